"""The frozen target: context features for training, next tokens for decoding.

Shapes: T flat context tokens, D documents, F = taps x H, H hidden size, V vocabulary,
P longest document of the batch, S tokens of one sequence.

Alone with prepare.py, this file imports transformers.
"""

from __future__ import annotations

import copy
import inspect
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from trainer.errors import InputError
from trainer.model.target_shape import checked_taps, read_shape, tap_ids_by_formula

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Target:
    """A causal language model that is never trained.

    Attributes:
        model: the whole transformers model, in eval mode, parameters frozen.
        shape: its sizes.
        tap_ids: which layers' outputs are the context features, in order.
        embedding_VH, head_VH: weights shared with the drafter; one tensor where they are tied.
        special_ids: pad, begin and end tokens, which can never serve as the mask token.
        eos_ids: tokens that end a completion.
    """

    def __init__(self, model: Any, tap_ids: Sequence[int], path: Path) -> None:
        self.model = model.eval().requires_grad_(False)
        self.path = path
        self.shape = read_shape(self.model.config)
        self.tap_ids = checked_taps(tap_ids, self.shape.layers)
        self.hidden_size = self.shape.hidden_size
        self.vocabulary = self.shape.vocabulary
        self.layers = self.shape.layers
        self.embedding_VH: Tensor = self.model.get_input_embeddings().weight
        self.head_VH: Tensor = self.model.get_output_embeddings().weight
        self.eos_ids = _ids(self.model, "eos_token_id")
        self.special_ids = (
            self.eos_ids | _ids(self.model, "bos_token_id") | _ids(self.model, "pad_token_id")
        )
        decoder = self.model.get_decoder()
        self._layers: nn.ModuleList = decoder.layers
        self._trunk = _cut(decoder, max(self.tap_ids) + 1)
        parameters = inspect.signature(self.model.forward).parameters
        # transformers renamed it; the old name warns in new releases, and old ones lack the new.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        taps: Sequence[int] | None = None,
        tap_count: int = 5,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> Target:
        """Read a folder of safetensors, a GGUF file, or a folder that holds one GGUF file.

        Raises:
            InputError: nothing loadable is there, or the model is of a kind we cannot serve.
        """
        source, options = _source(path)
        _quiet()
        config = transformers.AutoConfig.from_pretrained(source, **options)
        layers = config.get_text_config().num_hidden_layers
        tap_ids = checked_taps(taps, layers) if taps else tap_ids_by_formula(layers, tap_count)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation="sdpa", local_files_only=True, **options
        )
        return cls(model.to(device), tap_ids, Path(path))

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding_VH.device

    @property
    def feature_size(self) -> int:
        """F: width of one token's context features."""
        return len(self.tap_ids) * self.hidden_size

    def features(self, ids_T: Tensor, starts_D1: Tensor) -> Tensor:
        """Context features of every token; only the layers up to the last tap run.

        Documents run as right-padded rows: attention is causal, so a token never sees the
        padding behind it, and no mask is needed (which keeps the fast attention kernels).

        Args:
            ids_T: int64, documents one after the other; what follows the last one is padding.
            starts_D1: first slot of each document and the end of the last one. On the CPU, so
                that no copy from the device is waited for.

        Returns:
            features_TF, in the target's dtype, without gradient; zero where padding is.
        """
        device = self.device
        starts = starts_D1.to("cpu", torch.int64)
        lengths = starts.diff()
        total = int(starts[-1])
        features_TF = torch.zeros(
            ids_T.shape[0], self.feature_size, dtype=self.embedding_VH.dtype, device=device
        )
        if total == 0:
            return features_TF
        longest = int(lengths.max())
        row_t = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place_t = row_t * longest + torch.arange(total) - starts[row_t]
        place_t = place_t.to(device)
        padded = ids_T.new_zeros(len(lengths) * longest, device=device)
        padded[place_t] = ids_T[:total].to(device)
        # no_grad, not inference_mode: the drafter's backward must be able to save these.
        with torch.no_grad(), self._tapped() as outputs:
            self._trunk(input_ids=padded.view(len(lengths), longest), use_cache=False)
            for k, tap in enumerate(self.tap_ids):
                span = slice(k * self.hidden_size, (k + 1) * self.hidden_size)
                features_TF[:total, span] = outputs[tap].flatten(0, 1)[place_t]
        return features_TF

    def new_cache(self) -> Any:
        """An empty key/value cache that can be cropped.

        Raises:
            InputError: the target keeps recurrent state, which cannot be taken back.
        """
        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if "linear_attention" in kinds:
            raise InputError(
                f"target: {self.shape.family} keeps recurrent state, which cannot be cropped; "
                "decode with SGLang or vLLM"
            )
        cache = transformers.DynamicCache(config=config)
        if "sliding_attention" in kinds and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return cache

    def extend(self, ids_S: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Run the next S tokens of one sequence.

        Returns:
            logits_SV and features_SF; `cache` then holds S tokens more.
        """
        with torch.no_grad(), self._tapped() as outputs:
            reply = self.model(input_ids=ids_S[None], use_cache=True, **{self._cache_name: cache})
            features_SF = torch.cat([outputs[tap][0] for tap in self.tap_ids], dim=-1)
        return reply.logits[0], features_SF

    @staticmethod
    def crop(cache: Any, tokens: int) -> None:
        """Forget the last `tokens` tokens of the cache."""
        if tokens:
            # Negative means "remove this many" in every release; positive was taken away.
            cache.crop(-tokens)

    def tokenizer(self) -> Any:
        """The tokenizer beside the weights.

        Raises:
            InputError: there is none.
        """
        return load_tokenizer(self.path)

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, Tensor]]:
        outputs: dict[int, Tensor] = {}

        def keep(tap: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                outputs[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self._layers[tap].register_forward_hook(keep(tap)) for tap in self.tap_ids]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def convert(source: str | Path, out: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a GGUF file as a folder of safetensors with tokenizer and chat template.

    Loading a GGUF file takes tens of seconds, the folder about one. It is complete when it
    exists: it is written beside and renamed.

    Raises:
        InputError: `source` is no GGUF file, or `out` exists already.
    """
    out = Path(out)
    if out.exists():
        raise InputError(f"{out}: exists already; remove it first")
    folder, options = _source(source)
    if "gguf_file" not in options:
        raise InputError(f"{source}: is no GGUF file; it needs no conversion")
    _quiet()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    # The file on disk is quantised, what we write is not.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(out)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a target's folder or GGUF file.

    Raises:
        InputError: there is none.
    """
    if not has_tokenizer(Path(path)):
        raise InputError(f"{path}: has no tokenizer; copy tokenizer.json beside the weights")
    source, options = _source(path)
    _quiet()
    return transformers.AutoTokenizer.from_pretrained(source, local_files_only=True, **options)


def has_tokenizer(path: Path) -> bool:
    """Whether `load_tokenizer` has something to load."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return path.suffix == ".gguf" or any((path / name).exists() for name in names)


def _source(path: str | Path) -> tuple[Path, dict[str, Any]]:
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, {"gguf_file": path.name}
    if (path / "config.json").is_file():
        return path, {}
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1:
        return path, {"gguf_file": files[0].name}
    held = "does not exist" if not path.exists() else "holds neither config.json nor one GGUF file"
    raise InputError(f"--target-model {path}: {held}; give a model's folder or a .gguf file")


def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _ids(model: Any, name: str) -> frozenset[int]:
    found: set[int] = set()
    for holder in (model.config.get_text_config(), getattr(model, "generation_config", None)):
        value = getattr(holder, name, None)
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return frozenset(found)


def _cut(decoder: Any, layers: int) -> Any:
    """The decoder without the layers above `layers` and without final norm; shares all weights."""
    trunk = copy.copy(decoder)
    trunk._modules = dict(decoder._modules)  # noqa: SLF001 - copy.copy shares the dict itself
    trunk.layers = nn.ModuleList(list(trunk.layers)[:layers])
    trunk.norm = nn.Identity()
    return trunk
