"""The journal begins anew at each checkpoint: whatever moment the process is killed at, a chain of files is whole."""

from __future__ import annotations

from pathlib import Path

from scripted import output_of

KILLED_AT_EVERY_PLACE = '''
import json, os, shutil, signal, sys
from pathlib import Path
from rollover.checkpoint.journal import Journal, Mark
from rollover.checkpoint.store import CheckpointStore

work = Path(sys.argv[1]) / "work"
plain_write, plain_fsync = os.write, os.fsync

def opened():
    return CheckpointStore(str(work / "checkpoints"), keep=2), Journal(work / "journal")

def kill_after(left):
    """SIGKILL at this place: before a call that changes the disk, or in the middle of a write."""
    def place():
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(fd, data):
        place()
        half = plain_write(fd, bytes(data)[: len(data) // 2])
        place()
        return half + plain_write(fd, bytes(data)[half:])

    def fsync(fd):
        place()
        plain_fsync(fd)

    def hook(event, args):
        if event != "os.kill" and event.startswith(("open", "os.", "shutil.")):
            place()

    os.write, os.fsync = write, fsync
    sys.addaudithook(hook)

def live(told):
    store, journal = opened()
    known = 0

    def fact():
        nonlocal known
        journal.append({"kind": "fact", "number": known})
        known += 1
        plain_write(told, b"x")

    journal.begin(None)
    for step in (10, 20, 30):  # the last deletes the first
        fact()
        fact()
        mark = journal.begin(f"step-{step:06d}")
        store.write(f"step-{step:06d}", {"known": json.dumps([known, mark]).encode()})
        journal.commit(mark)
    fact()
    journal.close()
    os._exit(0)

def look():
    """How many facts the newest checkpoint and the journal know; then a run goes on, as after a restart."""
    store, journal = opened()
    known, mark = 0, None
    if names := store.list():
        known, mark = json.loads(Path(store.open(names[-1])["known"]).read_text())
    parts = journal.read(mark and Mark(*mark))
    facts = [r.meta["number"] for part in parts for r in part.records()]
    assert facts == list(range(known, known + len(facts))), (known, facts)
    known += len(facts)
    mark = journal.begin("step-000040")
    store.write("step-000040", {"known": json.dumps([known, mark]).encode()})
    journal.commit(mark)
    journal.close()
    assert len(os.listdir(work / "journal")) == 1, os.listdir(work / "journal")
    assert len(os.listdir(work / "checkpoints")) == min(len(names) + 1, 2), os.listdir(work / "checkpoints")
    return known

for places in range(10**6):
    shutil.rmtree(work, ignore_errors=True)
    told, telling = os.pipe()
    child = os.fork()
    if child == 0:
        kill_after(places)
        live(telling)
    _, status = os.waitpid(child, 0)
    os.close(telling)
    num_told = len(os.read(told, 1000))
    os.close(told)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    known = look()
    assert num_told <= known <= num_told + 1, (places, num_told, known)
    if status == 0:
        break
print(places, known)
'''


def test_sigkill_at_every_place_of_the_rotation_loses_no_record(tmp_path: Path) -> None:
    places, known = map(int, output_of(KILLED_AT_EVERY_PLACE, tmp_path).split())
    assert places > 100 and known == 7
