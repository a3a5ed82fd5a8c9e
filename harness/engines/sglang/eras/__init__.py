"""What differs between SGLang's releases, one module a difference. Each looks at what the installed SGLang has; docs/eras.md lists them."""
