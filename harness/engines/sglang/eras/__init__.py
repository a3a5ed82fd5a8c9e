"""What differs between SGLang's releases, one module a difference. Each asks what the installed SGLang has, no version."""
