"""``python -m lazyckpt``: the command line."""

from lazyckpt.cli import app

if __name__ == "__main__":
    app(prog_name="lazyckpt")
