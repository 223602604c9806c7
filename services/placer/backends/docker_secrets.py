"""What the placer reads from files for an engine, and nobody else may read: secrets and logins; says none of it."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

from shared.errors import BackendError, clip
from shared.messages.place import Secret

_HUB = "https://index.docker.io/v1/"


def only_ours(path: Path) -> bytes:
    """The content of a file. BackendError, without any of it, where others than its owner may use it; OSError."""
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise BackendError(f"{path} has mode {mode:03o}, allowed: a file that only its owner may read (chmod 600)")
        return file.read()


def secret_of(variable: str, reference: Secret, folder: Path | None) -> str:
    """The content of its file, less one line end. What goes wrong is told with its name only."""
    name = reference.secret
    if folder is None:
        raise BackendError(f"env {variable} refers to a secret, and this cluster has none")
    path = (folder / name.replace("\x00", "")).resolve()
    if "\x00" in name or not path.is_relative_to(folder.resolve()):
        raise BackendError(f"env {variable}: found secret {clip(name)}, allowed: a name below the folder of secrets")
    try:
        return only_ours(path).decode("utf-8").removesuffix("\n")
    except BackendError:
        raise BackendError(f"env {variable}: secret {clip(name)} may be read by others than its owner") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BackendError(f"env {variable}: secret {clip(name)} cannot be read: {reason}") from None


def registry_auth(image: str, auth_file: Path | None) -> dict[str, str]:
    """The header with the login to the image's registry; empty where there is none."""
    if auth_file is None:
        return {}
    first, slash, _ = image.partition("/")
    host = first if slash and (first == "localhost" or "." in first or ":" in first) else _HUB
    try:
        login = json.loads(only_ours(auth_file)).get("auths", {}).get(host)
        user, _, password = base64.b64decode(login["auth"]).decode().partition(":") if login else ("", "", "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BackendError(f"logins to registries cannot be read: {auth_file}") from None
    if not login:
        return {}
    content = json.dumps({"username": user, "password": password, "serveraddress": host})
    return {"X-Registry-Auth": base64.urlsafe_b64encode(content.encode()).decode()}
