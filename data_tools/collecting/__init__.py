"""From records to rows: names, types, rules, identities, duplicates, and the report of all of it."""
