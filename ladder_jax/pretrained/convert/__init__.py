"""The verb `convert`: a pretrained model in one form, or with other layers, to a checkpoint in another."""
