"""What the errors of the file systems of fsspec mean: an errno, and a reason that tells no secret."""

from __future__ import annotations

import errno
import os
from ftplib import Error as FTPError

_REFUSED = (401, 403, 530, 532, 550, 553)  # the second half: replies of FTP
_FULL = (507, 452, 552)
_CLOSED = (421, 425, 426)


def code_of(error: BaseException) -> int:
    """The status of HTTP or the reply of FTP; 0 if it has none."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            if isinstance(found := getattr(holder, name, None), int):
                return found
    if isinstance(error, FTPError) and (reply := str(error)[:3]).isdigit():
        return int(reply)
    return 0


def told_of(error: BaseException) -> tuple[int, str]:
    """The errno and the reason of an error, which quote nothing that was sent."""
    if isinstance(error, FileNotFoundError):
        if not isinstance(cause := error.__cause__, FTPError) or code_of(cause) == 550:
            return errno.ENOENT, "there is no such file"
        error = cause
    code = code_of(error)
    said = f" ({code or type(error).__name__})"
    if code == 404:
        return errno.ENOENT, f"there is no such file{said}"
    if isinstance(error, PermissionError) or code in _REFUSED or "Authentication" in type(error).__name__:
        return errno.EACCES, f"the credentials are missing, wrong, or do not allow it{said}"
    if code in _FULL:
        return errno.ENOSPC, f"the server is full{said}"
    if isinstance(error, TimeoutError):
        return errno.ETIMEDOUT, "no answer in time"
    if isinstance(error, ConnectionError | EOFError) or code in _CLOSED:
        return errno.ECONNABORTED, f"the connection failed{said}"
    if isinstance(error, NotImplementedError):
        return errno.ENOTSUP, "this file system of fsspec cannot do that"
    if isinstance(error, OSError) and (number := error.errno or 0) in errno.errorcode:
        return number, os.strerror(number)
    return errno.EIO, f"the request failed{said}"
