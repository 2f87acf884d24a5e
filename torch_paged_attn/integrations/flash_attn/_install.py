"""`install`: `import flash_attn` gives this package's functions."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types

VERSION = "2.8.3"

# flash-attn's module -> the module here that has the same public names
MODULES = {
    "flash_attn": ".flash_attn_interface",
    "flash_attn.bert_padding": ".bert_padding",
    "flash_attn.flash_attn_interface": ".flash_attn_interface",
    "flash_attn_interface": ".flash_attn_3",
}


def install() -> None:
    """Add the modules `flash_attn` and `flash_attn_interface` (FlashAttention-3) to `sys.modules`,
    so that `import flash_attn` finds the functions of this package.

    This is for programs that import flash-attn themselves. Transformers and diffusers, which check
    whether the distribution flash-attn is installed, still find none. A second call changes
    nothing. `uninstall` removes the modules.

    Raises:
        RuntimeError: flash-attn or FlashAttention-3 is installed.
    """
    for name in ("flash_attn", "flash_attn_interface"):
        if not _is_ours(name) and (name in sys.modules or importlib.util.find_spec(name)):
            raise RuntimeError(
                f"torch_paged_attn.integrations.flash_attn.install(): another package provides the"
                f" module {name}: uninstall it, or import from"
                " torch_paged_attn.integrations.flash_attn"
            )
    for name, ours in MODULES.items():
        if not _is_ours(name):
            _add(name, importlib.import_module(__package__ + ours))


def uninstall() -> None:
    """Remove the modules that `install` has added to `sys.modules`."""
    for name in MODULES:
        if _is_ours(name):
            del sys.modules[name]


def _is_ours(name: str) -> bool:
    return hasattr(sys.modules.get(name), "__torch_paged_attn__")


def _add(name: str, ours: types.ModuleType) -> None:
    """Add a module with a spec and a version, which importlib and version checks need."""
    module = types.ModuleType(name, ours.__doc__)
    is_package = name == "flash_attn"
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    # flash-attn's functions below autograd are in its submodule only
    names = [x for x in ours.__all__ if not (is_package and x.startswith("_"))]
    module.__dict__.update({public: getattr(ours, public) for public in names})
    module.__dict__.update(__version__=VERSION, __torch_paged_attn__=True, __all__=names)
    module.__file__ = ours.__file__
    if is_package:
        module.__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    sys.modules[name] = module
