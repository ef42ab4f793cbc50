"""Stands in for a large judge: an endpoint of the OpenAI API, of the standard library alone, that marks by a rule.

    python judge_server.py 8124

It reads what judge.txt asks, and answers as a model would, with a sentence and a line "Score: N".
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def mark(asked: str) -> int:
    """0 to 10: the share of digits in the answer."""
    answer = re.search(r"\[Answer\]\n(.*)\n\n\[End\]", asked, re.DOTALL)
    text = answer[1] if answer else ""
    return round(10 * sum(c.isdigit() for c in text) / max(1, len(text)))


class Judge(BaseHTTPRequestHandler):
    """POST /v1/chat/completions"""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        said = f"By the rule of this stand-in.\nScore: {mark(asked)}"
        tokens = len(asked.split()) + len(said.split())
        body = json.dumps(
            {
                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}],
                "usage": {"total_tokens": tokens, "completion_tokens": len(said.split())},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No line for each request."""


def server(port: int) -> ThreadingHTTPServer:
    """Of this machine alone; `serve_forever` starts it."""
    return ThreadingHTTPServer(("127.0.0.1", port), Judge)


if __name__ == "__main__":
    server(int(sys.argv[1]) if len(sys.argv) > 1 else 8124).serve_forever()
