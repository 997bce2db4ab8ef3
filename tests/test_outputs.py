"""Where a report is written: refused beforehand, whole or not at all, and a failure costs no other output."""

import errno
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from hesscore.errors import UsageError
from hesscore.output import check_writable, deliver, write

# --- one file ---


def test_a_file_is_written_whole(tmp_path):
    path = tmp_path / "rows.csv"
    for text in ("first, and longer\n", "ä\n"):
        write(str(path), text)
        assert path.read_text(encoding="utf-8") == text
    write(str(path), b"\x89\xff\n")
    assert path.read_bytes() == b"\x89\xff\n"
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_a_name_as_long_as_a_folder_takes_is_written(tmp_path):
    path = tmp_path / ("r" * 255)
    check_writable([str(path)])
    write(str(path), "text")
    assert path.read_text() == "text"


def test_a_new_file_may_be_read_by_whom_the_umask_lets(tmp_path):
    (tmp_path / "other").touch()
    write(str(tmp_path / "rows.csv"), "text")
    assert (tmp_path / "rows.csv").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("existing", [None, "as it was"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["write_bytes", "replace"])
def test_a_write_that_fails_leaves_all_as_it_was(tmp_path, monkeypatch, existing, error, when):
    path = tmp_path / "rows.csv"
    if existing:
        path.write_text(existing)

    def failing(self, *args, **kwargs):
        assert self != path
        with self.open("wb") as half:
            half.write(b"half of it")
        raise error

    monkeypatch.setattr(Path, when, failing)
    with pytest.raises(UsageError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write(str(path), "all of it" * 1000)
    if isinstance(error, OSError):
        assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert os.listdir(tmp_path) == (["rows.csv"] if existing else [])
    assert not existing or path.read_text() == existing


def test_an_interruption_waits_until_the_file_is_whole(tmp_path, monkeypatch):
    for method in (os.mkdir, os.rmdir, os.replace, os.open):
        name = method.__name__

        def interrupted(*args, method=method, **kwargs):
            os.kill(os.getpid(), signal.SIGINT)
            return method(*args, **kwargs)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, name, interrupted)
            write(str(tmp_path / name), "text")
        assert (tmp_path / name).read_text() == "text"
    assert sorted(os.listdir(tmp_path)) == ["mkdir", "open", "replace", "rmdir"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_dash_is_stdout(capsys):
    write("-", "a,b\n")
    assert capsys.readouterr() == ("a,b\n", "")


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "rows.csv")
    write(str(tmp_path / "link"), "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "rows.csv").read_text() == "text"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    check_writable([str(path)])
    write(str(path), "text")
    reader.join(10)
    assert read == ["text"]
    assert stat.S_ISFIFO(path.stat().st_mode)


# --- beforehand ---


NOWHERE = "no such folder, or no right to write there"
UNWRITABLE = {
    ".": "a folder",
    "none/rows.csv": NOWHERE,
    "dangling": NOWHERE,
    "file/rows.csv": "Not a directory",
    "loop": "Too many levels of symbolic links",
    "loop/rows.csv": "Too many levels of symbolic links",
    "r" * 256: "File name too long",
    "": "not the name of a file",
    "new/": "not the name of a file",
}


@pytest.mark.parametrize("path", UNWRITABLE)
def test_what_cannot_be_written_is_refused_beforehand(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("none/rows.csv")
    check_writable([None, "-", "new", "file"])
    with pytest.raises(UsageError) as caught:
        check_writable([None, path])
    assert str(caught.value) == f"{path or repr(path)}: cannot be written: {UNWRITABLE[path]}"
    assert sorted(os.listdir()) == ["dangling", "file", "loop"]


def test_a_folder_that_may_not_be_searched_is_refused_beforehand(tmp_path, monkeypatch):
    """As anyone but root finds it."""

    def closed(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(UsageError, match=r"rows\.csv: cannot be written: Permission denied"):
        check_writable([str(tmp_path / "rows.csv")])


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_may_not_be_written_is_refused_beforehand(tmp_path, what):
    path = tmp_path / "rows.csv"
    path.write_text("mine")
    (tmp_path if what == "folder" else path).chmod(0o500)
    with pytest.raises(UsageError, match="no right to write there"):
        check_writable([str(path)])
    tmp_path.chmod(0o700)


def test_an_input_is_not_overwritten(tmp_path):
    path, link = tmp_path / "ckpt.pt", tmp_path / "link.pt"
    path.write_bytes(b"weights")
    link.symlink_to(path)
    for output in (path, link, tmp_path / "." / "ckpt.pt"):
        with pytest.raises(UsageError, match="is an input, and would be overwritten"):
            check_writable([str(output)], [str(path), None])


@pytest.mark.parametrize("second", ["rows.csv", "./rows.csv", "folder/../rows.csv", "link", "through/rows.csv"])
def test_two_outputs_are_not_the_same_file(tmp_path, monkeypatch, second):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to("rows.csv")
    Path("through").symlink_to(".")
    check_writable(["rows.csv", "rows.json"])
    with pytest.raises(UsageError) as caught:
        check_writable(["rows.csv", second])
    assert str(caught.value) == f"two outputs cannot both go to {second}"


def test_two_outputs_are_not_both_stdout():
    check_writable([None, None])
    with pytest.raises(UsageError, match=r"^two outputs cannot both go to stdout$"):
        check_writable(["-", "-"])


# --- all that is to be written ---


def test_what_goes_to_stdout_is_last_and_instead_of_what_is_shown(tmp_path, capsys):
    path = tmp_path / "rows.json"
    deliver({"-": "a,b\n", str(path): "{}"}, lambda: print("the table"))
    assert (capsys.readouterr().out, path.read_text()) == ("a,b\n", "{}")
    deliver({None: "a,b\n", str(path): "[]"}, lambda: print(path.read_text()))
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_output_that_fails_does_not_cost_the_others(tmp_path, capsys):
    path = tmp_path / "rows.json"
    with pytest.raises(UsageError) as caught:
        deliver({"/dev/full": "a,b\n", str(path): "{}"}, lambda: print("the table"))
    assert str(caught.value) == "/dev/full: cannot be written: No space left on device"
    assert (capsys.readouterr().out, path.read_text()) == ("the table\n", "{}")


def test_every_output_that_fails_is_named(tmp_path):
    with pytest.raises(UsageError) as caught:
        deliver({str(tmp_path): "a,b\n", str(tmp_path / "none" / "rows.json"): "{}"}, lambda: None)
    assert str(caught.value).count("cannot be written: ") == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin"])
def test_what_belongs_to_a_folder_is_an_input_too(tmp_path, name):
    (tmp_path / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / name)
    for path in (tmp_path / name, tmp_path / "link"):
        with pytest.raises(UsageError, match="is an input, and would be overwritten"):
            check_writable([str(path)], [str(tmp_path)])
    (tmp_path / "rows.csv").touch()
    check_writable([str(tmp_path / "rows.csv"), str(tmp_path / "new.json")], [str(tmp_path)])


def test_what_tells_of_a_file_beside_it_is_an_input_too(tmp_path):
    for name in ("ckpt.pt", "meta.pkl", "config.json"):
        (tmp_path / name).touch()
    for name in ("ckpt.pt", "meta.pkl", "config.json"):
        with pytest.raises(UsageError, match="is an input, and would be overwritten"):
            check_writable([str(tmp_path / name)], [str(tmp_path / "ckpt.pt")])
