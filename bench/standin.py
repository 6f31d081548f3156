"""An engine that takes exactly so long to load and to stop, and does nothing else: what `swap.py` swaps.

    python -I -S bench/standin.py PORT LOAD_S STOP_S [WORDS …]

As llama-server does it, it listens at once and answers 503 while it loads.
"""

import os
import signal
import socket
import sys
import threading
import time

BORN = time.monotonic()


def answer(client: socket.socket, load: float) -> None:
    with client:
        while head := client.recv(65536):
            end = head.partition(b"\r\n\r\n")[0].lower()
            length = int(end.partition(b"content-length:")[2].split()[0]) if b"content-length:" in end else 0
            left = length - (len(head) - len(end) - 4)
            while left > 0:
                left -= len(client.recv(left))
            status = b"200 OK" if time.monotonic() - BORN >= load else b"503 Loading"
            client.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


def main(port: int, load: float, stop: float) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    server = socket.create_server(("127.0.0.1", port), backlog=64)

    def serve() -> None:
        while True:
            threading.Thread(target=answer, args=(server.accept()[0], load), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    time.sleep(stop)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
