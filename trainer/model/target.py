"""The frozen target: context features for training, next tokens for decoding.

Shapes: T flat context tokens, D documents, F = taps x H, H hidden size, V vocabulary,
P longest document of the batch, S tokens of one sequence.

Alone with prepare.py, this file imports transformers.
"""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from trainer.errors import InputError
from trainer.model import documents
from trainer.model.target_shape import checked_taps, read_shape, tap_ids_by_formula
from trainer.model.trunk import Trunk

if TYPE_CHECKING:
    from collections.abc import Sequence


# How attention is named to transformers: its own, but for rows of several documents.
_BY_DOCUMENT = "sdpa_by_document"
transformers.AttentionInterface.register(
    _BY_DOCUMENT, documents.by_document(transformers.AttentionInterface()["sdpa"])
)
transformers.AttentionMaskInterface.register(
    _BY_DOCUMENT, transformers.AttentionMaskInterface()["sdpa"]
)


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
        self._trunk = Trunk(self.model.get_decoder(), self.tap_ids, self.embedding_VH)
        self._mixes: str | None = None
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
            source, dtype=dtype, attn_implementation=_BY_DOCUMENT, local_files_only=True, **options
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

        Documents of like length run as right-padded rows: attention is causal, so a token never
        sees the padding behind it, and no mask is needed (which keeps the fast attention
        kernels). Where that would waste much, they run end to end in one row, kept apart.

        Args:
            ids_T: int64, documents one after the other; what follows the last one is padding.
            starts_D1: first slot of each document and the end of the last one. On the CPU, so
                that no copy from the device is waited for.

        Returns:
            features_TF, in the target's dtype, without gradient; zero where padding is.
        """
        return self._trunk.features(ids_T, starts_D1, packed=lambda: not self.mixes_documents())

    def mixes_documents(self) -> str:
        """Why documents cannot lie in one row; empty where they can.

        Beyond what the config says it is tried: a document behind another must have the features
        that it has alone.
        """
        if self._mixes is None:
            kinds = set(getattr(self.model.config.get_text_config(), "layer_types", None) or ())
            other = sorted(kinds - {"full_attention", "sliding_attention"})
            if other:
                self._mixes = f"has layers of {', '.join(other)}, which carry state along a row"
            else:
                self._mixes = "" if self._trunk.keeps_apart() else "lets documents in one row meet"
        return self._mixes

    def compile_(self) -> None:
        """Compile the layers that `features` runs, for rows of any number and length.

        A layer's forward is compiled, not the layer: hooks of the layer then stay outside.
        """
        for layer in self._trunk.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)

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
        with torch.no_grad(), self._trunk.tapped() as outputs:
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
