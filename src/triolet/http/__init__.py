"""The engine over HTTP, as an ASGI app: what OpenAI's and vLLM's clients speak, and a page to try it with.

    app = triolet.http.create_app(engine)

It runs on any ASGI server on Trio, `triolet serve` among them, and can be mounted in an app of one's own.
"""

from triolet.http.app import create_app

__all__ = ["create_app"]
