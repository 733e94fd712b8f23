"""The configuration of every command, from a YAML file to frozen values.

Read the modules in this order:

- `schema`: the keys of each command, with `draft_sections` for those of each kind of draft;
- `keys`: how a key is declared, and the classes that hold keys; `types`: what values may be;
- `rules`: which combinations are wrong, and which keys have no effect given others;
- `load`: turns a file, overrides and options into a configuration, or reports all problems;
- `yaml_source`: the values as they were written, with the place of each;
- `problems`: messages on what is wrong; `removed_keys`: what happened to earlier keys;
- `paths`: finds files; `docs`: generates the reference of all keys.
"""
