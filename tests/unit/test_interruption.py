"""An interrupt that Python loses ends the work at its next step."""

import signal
import threading

import pytest

from quark.torch.files import fresh_directory
from quark.torch.interruption import kept_interrupts, raise_interrupt
from quark.torch.progress import show_progress


@pytest.fixture(autouse=True)
def python_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting:
    """The user interrupts while an object is freed, where Python loses exceptions."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


class Failing:
    def __del__(self):
        raise ValueError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestLost:
    @pytest.mark.parametrize("is_shown", [True, False])
    def test_next_step_raises_it(self, is_shown):
        done = []
        with pytest.raises(KeyboardInterrupt), kept_interrupts():
            for item in show_progress([1, 2, 3, 4], "steps", is_shown):
                done.append(item)
                if item == 2:
                    Interrupting()
        assert done == [1, 2]

    def test_output_does_not_take_its_place(self, tmp_path):
        output = tmp_path / "out"
        with (
            pytest.raises(KeyboardInterrupt),
            kept_interrupts(),
            fresh_directory(output) as partial,
        ):
            (partial / "a").touch()
            Interrupting()
        assert list(tmp_path.iterdir()) == []

    def test_told_once(self):
        told = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.unraisablehook", lambda lost: told.append(lost.exc_type))
            with pytest.raises(KeyboardInterrupt), kept_interrupts():
                Interrupting()
                Failing()
                raise_interrupt()
            Failing()
        assert told == [ValueError, ValueError]

    def test_raised_once(self):
        with kept_interrupts():
            Interrupting()
            with pytest.raises(KeyboardInterrupt):
                raise_interrupt()
            raise_interrupt()

    def test_forgotten_after_the_context(self):
        with kept_interrupts():
            Interrupting()
        raise_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_cleaning_up_after_an_interrupt_goes_on():
    cleaned = []
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            cleaned += show_progress([1, 2], "cleaning up")
    assert cleaned == [1, 2]


def test_another_handler_stays():
    received = []
    signal.signal(signal.SIGINT, lambda *_: received.append(1))
    with kept_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise_interrupt()
    assert received == [1]


def test_other_threads_run_without_it():
    failures = []

    def work():
        try:
            with kept_interrupts():
                raise_interrupt()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
