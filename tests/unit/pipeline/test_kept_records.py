"""What one thread logs is kept from the handlers, whatever other threads log."""

import logging
import threading

from quark.torch.pipeline.kept_records import kept_records

logger = logging.getLogger("quark")


def test_records_of_the_thread(caplog):
    other = threading.Thread(target=logger.warning, args=("of another thread",))
    with kept_records() as outer:
        logging.getLogger("quark.torch").warning("kept %d", 1)
        logging.getLogger("someone").warning("of others")
        with kept_records() as inner:
            logger.error("inside")
        with kept_records(False) as none:
            logger.warning("kept 2")
        other.start()
        other.join()
    logger.warning("after")
    assert outer == [(logging.WARNING, "kept 1"), (logging.WARNING, "kept 2")]
    assert inner == [(logging.ERROR, "inside")] and none == []
    assert [r.message for r in caplog.records] == ["of others", "of another thread", "after"]


def test_several_handlers_and_contexts_that_overlap(caplog):
    """A record is kept once; contexts of threads end in any order."""
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        first, second = kept_records(), kept_records()
        kept = first.__enter__()
        logger.warning("once")
        worker = threading.Thread(target=second.__enter__)
        worker.start()
        worker.join()
        first.__exit__(None, None, None)
        logger.warning("after")
        second.__exit__(None, None, None)
        assert kept == [(logging.WARNING, "once")]
        assert [r.message for r in caplog.records] == ["after"]
        assert handler.filters == []
    finally:
        logger.removeHandler(handler)
