"""Let code that imports flash-attn run on this package."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types

VERSION = "2.8.3"

# a module's name, and the module of ours whose public names it has
MODULES = {
    "flash_attn": ".flash_attn_interface",
    "flash_attn.bert_padding": ".bert_padding",
    "flash_attn.flash_attn_interface": ".flash_attn_interface",
    "flash_attn_interface": ".flash_attn_3",
}


def install() -> None:
    """Put modules `flash_attn` and, as FlashAttention-3 has it, `flash_attn_interface` into
    `sys.modules`, so that `import flash_attn` finds the functions of this package.

    For programs whose source says `import flash_attn`. Libraries that ask for an installed
    distribution of that name, as Transformers and diffusers do, see none. A second call changes
    nothing; `uninstall` takes the modules out again.

    Raises:
        RuntimeError: flash-attn or FlashAttention-3 is installed here.
    """
    for name in ("flash_attn", "flash_attn_interface"):
        if not _is_ours(name) and (name in sys.modules or importlib.util.find_spec(name)):
            raise RuntimeError(
                f"torch_paged_attn.integrations.flash_attn.install: a module {name} came with"
                " another package; allowed: an environment without it, or imports from"
                " torch_paged_attn.integrations.flash_attn"
            )
    for name, ours in MODULES.items():
        if not _is_ours(name):
            _add(name, importlib.import_module(__package__ + ours))


def uninstall() -> None:
    """Take the modules of `install` out of `sys.modules`."""
    for name in MODULES:
        if _is_ours(name):
            del sys.modules[name]


def _is_ours(name: str) -> bool:
    return hasattr(sys.modules.get(name), "__torch_paged_attn__")


def _add(name: str, ours: types.ModuleType) -> None:
    """A module with a spec and a version: find_spec and checks of versions ask for them."""
    module = types.ModuleType(name, ours.__doc__)
    is_package = name == "flash_attn"
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    module.__dict__.update({public: getattr(ours, public) for public in ours.__all__})
    module.__dict__.update(__version__=VERSION, __torch_paged_attn__=True, __all__=ours.__all__)
    if is_package:
        module.__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    sys.modules[name] = module
