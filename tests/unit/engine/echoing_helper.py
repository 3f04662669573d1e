"""A helper process that answers with the question: `python -m tests.unit.engine.echoing_helper`."""

from engine.helper import answer_questions

if __name__ == "__main__":
    answer_questions(lambda question: question)
