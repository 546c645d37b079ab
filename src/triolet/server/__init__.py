"""Serve an engine over HTTP and WebSockets: an ASGI app with the routes of OpenAI and vLLM, and a chat page.

    app = triolet.server.create_app(engine)

The app runs on any ASGI server on Trio and can be mounted in another app. `serve(engine)` listens itself, for
WebSockets too.
"""

from triolet.server.routes.app import create_app
from triolet.server.routes.serve import serve

__all__ = ["create_app", "serve"]
