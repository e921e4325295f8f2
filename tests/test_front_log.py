"""The log tells nothing that is nobody's business, and a disk that refuses it disturbs nobody."""

from __future__ import annotations

import errno
import logging
from io import StringIO
from pathlib import Path

import pytest

from meshinfer.front import run


class Refusing(StringIO):
    """A file on a disk that is full or broken."""

    number = errno.ENOSPC

    def flush(self) -> None:
        if not self.closed:
            raise OSError(self.number, "refused")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_refuses_the_log_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Neither while the agent runs nor at its end, where the log is flushed once more."""
    monkeypatch.setattr(Refusing, "number", number)
    with run._logging_to(tmp_path):
        handler = next(one for one in logging.getLogger().handlers if isinstance(one, run._Log))
        handler.close()
        monkeypatch.setattr(handler, "_open", Refusing)
        logging.getLogger("meshinfer").info("no room for %s", "this")
    assert capsys.readouterr().err == ""
