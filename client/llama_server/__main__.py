"""`python -m prefixd.client.llama_server`."""

from .main import main

if __name__ == "__main__":
    main()
