"""The stub of the helper classes is the one that their table makes."""

from runpy import run_path

from quark.torch.quantization.config import spec_classes

SCRIPT = "scripts/spec_stub.py"


def test_the_stub_is_that_of_the_table(request):
    script = run_path(str(request.config.rootpath / SCRIPT))
    written = script["STUB"].read_text(encoding="utf-8")
    assert written == script["stub"](), f"run python {SCRIPT}"
    assert all(f"class {name}(DataTypeSpec):" in written for name in spec_classes.SPEC_CLASSES)


def test_the_types_of_the_stub_exist():
    from typing import get_type_hints

    for cls in spec_classes.SPEC_CLASSES.values():
        assert get_type_hints(cls).keys() >= cls.__dataclass_fields__.keys()
