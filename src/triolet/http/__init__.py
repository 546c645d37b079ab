"""The engine over HTTP, as an ASGI app: what OpenAI's and vLLM's clients speak, and a page to try it with.

    app = triolet.http.create_app(engine)

It runs on any ASGI server on Trio, and can be mounted in an app of one's own. `serve(engine)` listens by itself, for
WebSockets, too.
"""

from triolet.http.app import create_app
from triolet.http.serving import serve

__all__ = ["create_app", "serve"]
