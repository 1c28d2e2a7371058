"""Commands: parse, call, print. `main` lists them; each lives in a file of its own."""
