"""Says which packages to install where one is missing that not every use needs."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def installed(needs: str, *packages: str) -> Iterator[None]:
    """Imports within the block, or an ImportError that says what to install.

    Example:
        >>> with installed("Pictures are drawn by nothing", "nothing-of-the-kind"):
        ...     import nothing_of_the_kind
        Traceback (most recent call last):
        ImportError: Pictures are drawn by nothing, which is not installed; run: pip install
        nothing-of-the-kind

    Args:
        needs: what needs which library, ending in the library's name.
        packages: what `pip install` takes.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"{needs}, which is not installed; run: pip install {' '.join(packages)}"
        ) from error


def pictures() -> contextlib.AbstractContextManager[None]:
    """Imports of matplotlib within the block, see `installed`."""
    return installed("Pictures are drawn by matplotlib", "matplotlib")
