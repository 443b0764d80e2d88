"""Train in a notebook that papermill runs."""

import nbformat
import papermill

notebook = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell("from training import train\nprint('true steps', train())")],
    metadata={"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}},
)
nbformat.write(notebook, "train.ipynb")
papermill.execute_notebook("train.ipynb", "done.ipynb", progress_bar=False)
print("true steps", 8)
