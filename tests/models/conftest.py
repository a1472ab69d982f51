"""Its being here puts this folder on the path, so that the folders below find `model_toys`."""
