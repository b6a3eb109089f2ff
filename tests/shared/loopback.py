"""A web server on this machine that behaves as badly as it is told to."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAYLOAD = bytes(range(256)) * 2000


@contextmanager
def server(payload=PAYLOAD, send=None, ranges=True, answers=True, stalls=False):
    """Serve `payload` on 127.0.0.1, or only its first `send` bytes; yields (url, ranges asked)."""
    asked, done = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Range"])
            if not answers:
                done.wait(20)
                return
            first = int(asked[-1][6:-1]) if ranges and asked[-1] else 0
            if first >= len(payload):
                self.send_error(416)
                return
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(payload) - first))
            self.end_headers()
            self.wfile.write(payload[first:send])
            if stalls:
                self.wfile.flush()
                done.wait(20)

        def log_message(self, *arguments):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}/file.tar.gz", asked
    finally:
        done.set()
        web.shutdown()
        web.server_close()
        thread.join()
