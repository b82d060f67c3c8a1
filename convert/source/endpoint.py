"""How the Hub's address is shown."""

from urllib.parse import urlsplit


def shown_endpoint(url: str) -> str:
    """A URL without what may be secret in it: user, password, query."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:  # its text may quote a password
        return "not a URL"
    if not parts.hostname or "@" in parts.path:
        return "not a URL"
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"
