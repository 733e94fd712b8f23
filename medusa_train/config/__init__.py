"""The configuration of every command, from a YAML file to frozen values.

In the order of reading:

- `schema`: the keys of each command, with `draft_sections` for those of each kind of draft;
- `keys`: how a key is declared, and the classes that hold keys; `types`: what values may be;
- `rules`: which combinations are wrong, and which keys have no effect given others;
- `load`: a file, overrides and options to a configuration, or to all problems at once;
- `yaml_source`: the values as they were written, with the place of each;
- `problems`: what is wrong, for people; `removed_keys`: what became of earlier keys;
- `paths`: finds files; `docs`: generates the reference of all keys.
"""
