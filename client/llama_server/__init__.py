"""`prefixd-llama-server`: a proxy before llama.cpp's server that keeps and restores its prompts."""
