"""Runs of ``quark quantize`` in forks of one process, which are killed and repeated.

    python -m tests.unit.cli.quantize.forks DIRECTORY KILLS

This process imports once and computes nothing: threads of its own would be missing in its forks.
``KILLS`` is a list of objects of JSON: ``command``; ``before`` and ``after``, the number of
processes that run until one is killed, and that go on; ``moment``, when and which is killed::

    {"seconds": 0.5, "victim": 1}    at a random moment of the first half of the time of a whole run
    {"block": 2, "victim": 0}        while it writes the second block, or learns that it is written
    {"end": true, "victim": 0}       while it removes the journal: its output is in place
"""

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path


def main(place, kills):
    """Run each command alone, then with a kill, and compare the files."""
    random.seed(0)
    expected = {}
    for number, kill in enumerate(kills):
        key = json.dumps(kill["command"])
        if key not in expected:
            start = time.monotonic()
            output = place / f"whole-{number}"
            assert run(output, kill["command"], 1) == [0]
            seconds = time.monotonic() - start
            expected[key] = (output / "SHA256SUMS").read_text(), seconds
        sums, seconds = expected[key]
        output = place / f"killed-{number}"
        codes = run(output, kill["command"], kill["before"], kill["moment"], seconds)
        left = sum(1 for _ in place.glob(f"{output.name}.partial/blocks/?-*"))
        case = kill, codes, left
        assert any(codes) or "seconds" in kill["moment"], case
        # A run that is killed after the removal of its journal has done everything.
        is_journal = (place / f"{output.name}.partial").exists()
        if any(codes) and (is_journal or not output.exists()):
            assert run(output, kill["command"], kill["after"]) == [0] * kill["after"], case
        assert (output / "SHA256SUMS").read_text() == sums, case
        print("KILLED", any(codes), left, flush=True)
    assert not list(place.glob("*.partial")), list(place.iterdir())


def run(output, command, count, moment=None, seconds=0.0):
    """Run a command in so many processes, as torchrun does; return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [fork(output, command, rank, count, port, moment) for rank in range(count)]
    if moment is not None and "seconds" in moment:
        time.sleep(random.uniform(0.05, 1) * moment["seconds"] * seconds)
        os.kill(children[moment["victim"] % count], signal.SIGKILL)
    codes = {}
    while len(codes) < count:
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:  # torchrun ends the others
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGTERM)
    return [codes[child] for child in children]


def fork(output, command, rank, count, port, moment):
    """Start one of several processes; return its number."""
    child = os.fork()
    if child:
        return child
    if count > 1:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
        os.environ |= {key: str(value) for key, value in own.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if moment is not None and "block" in moment and rank == moment["victim"] % count:
        _die_in(moment["block"])
    if moment is not None and "end" in moment and rank == moment["victim"]:
        _die_at_the_end()
    from quark.cli.main import main

    try:
        main([*command, "--output_dir", str(output)])
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)


def _die_in(number):
    """Let this process die when a block is written: the first one while it writes."""
    from quark.torch.pipeline import journal

    written = []

    def die(*_):
        written.append(None)
        if len(written) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ.get("RANK", "0")) == 0:
        journal.sync_file = die
    else:
        read = journal.PassFiles._read
        journal.PassFiles._read = lambda *arguments: (die(), read(*arguments))[1]


def _die_at_the_end():
    """Let this process die when the blocks of the journal are removed."""
    from quark.torch.pipeline import journal

    journal.Journal._clear = lambda self: os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    # What the runs need, imported once.
    from transformers import (  # noqa: F401
        AutoTokenizer,
        BartForConditionalGeneration,
        LlamaForCausalLM,
        MixtralForCausalLM,
    )

    import quark.cli.quantize.job
    import quark.torch.export.api
    import quark.torch.quantization.api  # noqa: F401

    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
