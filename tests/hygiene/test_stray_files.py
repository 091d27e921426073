"""No output of a run is in version control by mistake."""

from tests.hygiene.test_machine_paths import repository_files

# What outputs have and sources do not. The shipped model has no sums beside it.
MARKS = {"SHA256SUMS", "generation_config.json"}
SHIPPED = "quark/demo/model"


def stray(names):
    """Files that only an output has, outside of the shipped model."""
    return [
        name for name in names if name.rpartition("/")[2] in MARKS and not name.startswith(SHIPPED)
    ]


def test_no_output_is_in_version_control(root):
    assert stray(p.relative_to(root).as_posix() for p in repository_files(root)) == []


def test_an_output_is_found():
    assert stray(["q/SHA256SUMS", "quark/demo/model/generation_config.json", "a.py"]) == [
        "q/SHA256SUMS"
    ]
