"""A static file server on loopback, for tests and for the quickstart's index.

It serves one folder on a free port of 127.0.0.1 and is gone with the `with` block.  It is not made for a network.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pelton_build.errors import BuildError

__all__ = ["main", "serving"]

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Static files with the types that installers ask for; requests go to the debug log, not to the screen."""

    extensions_map = {  # noqa: RUF012 - the base class's own attribute
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".html": "text/html; charset=utf-8",
        ".json": "application/vnd.pypi.simple.v1+json",
        ".whl": "application/zip",
        ".metadata": "text/plain; charset=utf-8",
    }

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s %s", self.address_string(), format % args)


@contextlib.contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[str]:
    """Serve `folder` while the block runs; gives the URL without a final slash.  Port 0 takes a free one.

    Raises:
        BuildError: the folder is missing, or the port is taken.
    """
    if not folder.is_dir():
        raise BuildError(f"{folder}: not a folder; make the index first: nox -s index")
    handler = functools.partial(_Handler, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise BuildError(f"cannot listen on {HOST}:{port} ({error.strerror}); choose another port") from error
    thread = threading.Thread(target=server.serve_forever, name="index-server", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m pelton_build.serve [FOLDER]``: serve until interrupted; prints the URL first."""
    parser = argparse.ArgumentParser(
        prog="python -m pelton_build.serve", description="Serve an index on loopback."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("site"))
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    try:
        with serving(options.folder, options.port) as url:
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
