"""What an exception says to a person, without the operating system's numbers."""


def reason(error: BaseException) -> str:
    """The operating system's words alone, for a message that names the file; else the text of the exception."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def placed(error: BaseException) -> str:
    """`file: words` for what the operating system refused, for a message that does not name the file."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return reason(error)
