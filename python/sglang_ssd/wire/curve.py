"""Who may speak to whom across hosts: ZeroMQ CURVE keys, in certificate files as ``zmq.auth`` writes them.

CURVE encrypts, proves the draft to the verifier, and the verifier to the draft. Sockets that only this host can reach
(``ipc://``, loopback) need no keys.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import stat
from typing import NamedTuple

import zmq
from zmq.auth import create_certificates, load_certificate, load_certificates

logger = logging.getLogger(__name__)

#: Base name of the files that ``generate_keys`` writes.
KEY_NAME = "sglang-ssd"


class DraftKeys(NamedTuple):
    """The draft's own pair, and the folder of ``*.key`` files that name the verifiers it serves."""

    public: bytes
    secret: bytes
    authorized_dir: str


class VerifierKeys(NamedTuple):
    """The verifier's own pair, and the public key that its draft must prove to have."""

    public: bytes
    secret: bytes
    draft_public: bytes


def generate_keys(directory: str) -> tuple[str, str]:
    """Write a new pair into ``directory``; returns the paths of the public file (``.key``) and the secret one (mode
    0600). Raises ValueError in one line where files would be replaced, OSError where they cannot be written."""
    public, secret = (os.path.join(directory, f"{KEY_NAME}.{ending}") for ending in ("key", "key_secret"))
    for path in (public, secret):
        if os.path.lexists(path):
            raise ValueError(f"{path} exists already: remove it first if the key is to be replaced")
    os.makedirs(directory, exist_ok=True)
    mask = os.umask(0o077)
    try:
        create_certificates(directory, KEY_NAME)
    finally:
        os.umask(mask)
    os.chmod(public, 0o644)
    return public, secret


def load_draft_keys(secret_option: str, secret_path: str, dir_option: str, authorized_dir: str) -> DraftKeys:
    """Raises ValueError in one line that names the option whose value cannot be used."""
    public, secret = _load_pair(secret_option, secret_path)
    if not _authorized(dir_option, authorized_dir):
        raise ValueError(f"{dir_option} {authorized_dir}: holds no *.key file, so that nobody could connect")
    return DraftKeys(public, secret, authorized_dir)


def load_verifier_keys(
    secret_option: str, secret_path: str, draft_option: str, draft_path: str
) -> VerifierKeys:
    """Raises ValueError in one line that names the option whose value cannot be used."""
    return VerifierKeys(*_load_pair(secret_option, secret_path), _load(draft_option, draft_path)[0])


def is_authorized(public: bytes, authorized_dir: str) -> bool:
    """Whether a file of this folder holds this public key. It is read anew each time: keys come and go while the draft
    runs. A folder that cannot be read lets nobody in."""
    try:
        return public in _authorized("authorized keys", authorized_dir)
    except ValueError as error:
        logger.error("%s: nobody is let in", error)
        return False


def why_refused(endpoint: str, has_keys: bool) -> str | None:
    """Why this endpoint may not be used with or without keys, in one line; None when it may."""
    transport, _, address = endpoint.partition("://")
    if transport not in ("ipc", "tcp"):
        return "not an ipc:// or tcp:// endpoint"
    if transport == "ipc":
        return "CURVE keys are for tcp:// endpoints" if has_keys else None
    if not has_keys and not is_loopback(address.rpartition(":")[0]):
        return "other hosts can reach it, so that it needs CURVE keys"
    return None


def is_loopback(host: str) -> bool:
    """Whether this host or interface, as it stands in a ``tcp://`` endpoint, is reached from this machine alone."""
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # "*", another name, or ZeroMQ's "source;destination".


def _authorized(option: str, directory: str) -> dict[bytes, bool]:
    try:
        return load_certificates(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {directory}: {error}") from None


def _load_pair(option: str, path: str) -> tuple[bytes, bytes]:
    public, secret = _load(option, path)
    if secret is None:
        raise ValueError(f"{option} {path}: holds no secret key; name the .key_secret file")
    if os.stat(path).st_mode & stat.S_IROTH:
        raise ValueError(f"{option} {path}: everybody can read it; chmod 600 keeps the key secret")
    if _public_of(secret) != public:
        raise ValueError(f"{option} {path}: its two keys are no pair")
    return public, secret


def _load(option: str, path: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {path}: {error}") from None
    if len(public) != 40:
        raise ValueError(f"{option} {path}: its public key has {len(public)} characters instead of 40")
    return public, secret


def _public_of(secret: bytes) -> bytes | None:
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError:
        return None
