"""The configuration of every command, from a YAML file to frozen values.

`yaml_source` reads the file with the line of every key, `load` sets overrides and options in it,
`schema` (with `draft_sections` and `types`) validates each value, `rules` checks combinations, and
`problems` says what is wrong, at which line. `removed_keys` explains keys of earlier versions,
`paths` finds files, and `docs` generates the reference of all keys.
"""
