"""The verb `convert`: write a pretrained model in another format, or with ladder layers."""
