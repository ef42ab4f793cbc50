"""The main function of the children of test_worker.py: one call, one behaviour."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np

from rollover.workers.child import Calls, ReplyTooLong


def main(max_bytes: str) -> None:
    calls = Calls(int(max_bytes))
    for call in calls:
        match call["do"]:
            case "echo":
                calls.reply(**call)
            case "later":
                time.sleep(0.3)
                calls.reply(late=True)
            case "pid":
                calls.reply(pid=os.getpid())
            case "start":
                calls.reply(pid=subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            case "count":
                for number in range(call["to"]):
                    calls.reply(number=number)
            case "print":
                print("printed")
                print(repr(sys.stdin.read()), file=sys.stderr)
                calls.reply()
            case "hang":
                time.sleep(1000)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "garbage":
                os.write(int(call["fd"]), b"\xff" * 64)
            case "forged":
                calls.reply(array=np.empty(0), forged={"array:": call["place"]})
            case "half":
                os.write(int(call["fd"]), bytes(7))
                time.sleep(1000)
            case "large":
                try:
                    calls.reply(text="x" * call["chars"])
                except ReplyTooLong as error:
                    calls.reply(error=str(error))
            case "twice":
                calls.reply(first=True)
                calls.reply(first=False)
