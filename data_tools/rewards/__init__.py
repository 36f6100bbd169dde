"""Where rewards come from: rules at collect, functions, later feedback, judging again."""
