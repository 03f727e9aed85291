"""The model that translates numbers, dates and money: grammar, data, training, evaluation."""
