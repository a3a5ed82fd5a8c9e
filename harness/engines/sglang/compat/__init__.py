"""What differs between SGLang's releases, one module a difference, chosen by what the installed SGLang has."""
