"""The end of the program that a host receives: it lets `import agent.x` find source text.

The link sends `SOURCES = {module name: source text}` followed by this file; both run as one
program in `__main__`, and nothing is written to the host's disk. `SOURCES` holds `agent` and the
modules that the verb needs. linecache asks `get_source`, so tracebacks show their lines.
"""

import sys
from importlib.machinery import ModuleSpec
from typing import Any

SOURCES: "dict[str, str]" = globals().get("SOURCES", {})


class Received:
    """Finds and loads the modules of package `agent` from the text that came with the request."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """The module's specification, or None for a module that was not sent."""
        del path, target
        if name not in SOURCES:
            return None
        file = name.replace(".", "/") + ("/__init__.py" if name == "agent" else ".py")
        # It quacks like importlib.abc.Loader; a subclass would cost the import of that.
        loader: Any = Received
        spec = ModuleSpec(name, loader, origin=file, is_package=name == "agent")
        spec.has_location = True
        return spec

    @staticmethod
    def create_module(spec: object) -> None:
        """None: an ordinary module will do."""
        del spec

    @staticmethod
    def exec_module(module: object) -> None:
        """Run the module's source."""
        spec = module.__spec__  # type: ignore[attr-defined]
        exec(compile(SOURCES[spec.name], spec.origin, "exec"), module.__dict__)  # noqa: S102

    @staticmethod
    def get_source(name: str) -> "str | None":
        """The text of a module that was sent; what linecache calls."""
        return SOURCES.get(name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Received)
    from agent.verbs import main  # type: ignore[import-not-found]

    main(sys.stdin.buffer, sys.stdout.buffer)
