"""The engine over HTTP, as an ASGI app: what OpenAI's and vLLM's clients speak, and a page to try it with.

    app = triolet.server.create_app(engine)

It runs on any ASGI server on Trio, and can be mounted in an app of one's own. `serve(engine)` listens by itself, for
WebSockets, too.
"""

from triolet.server.routes.app import create_app
from triolet.server.routes.serve import serve

__all__ = ["create_app", "serve"]
