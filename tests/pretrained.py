"""Fixed texts in the public domain, as token ids of SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

TEXTS = {
    # NASA, "Our Sun: Facts": a work of the United States government
    "sun": (
        "The Sun is a 4.5 billion-year-old yellow dwarf star, a hot glowing ball of hydrogen and helium, at the center "
        "of our solar system. It's about 93 million miles (150 million kilometers) from Earth and it's our solar "
        "system's only star. Without the Sun's energy, life as we know it could not exist on our home planet. From our "
        "vantage point on Earth, the Sun may appear like an unchanging source of light and heat in the sky. But the "
        "Sun is a dynamic star, constantly changing and sending energy out into space. The science of studying the Sun "
        "and its influence throughout the solar system is called heliophysics. The Sun is the largest object in our "
        "solar system. Its diameter is about 865,000 miles (1.4 million kilometers). Its gravity holds the solar "
        "system together, keeping everything from the biggest planets to the smallest bits of debris in orbit around "
        "it. Even though the Sun is special to us, there are billions of stars like our Sun scattered across the Milky "
        "Way galaxy."
    ),
    # Charles Darwin, On the Origin of Species (1859), introduction
    "species": (
        "When on board H.M.S. Beagle, as naturalist, I was much struck with certain facts in the distribution of the "
        "inhabitants of South America, and in the geological relations of the present to the past inhabitants of that "
        "continent. These facts seemed to me to throw some light on the origin of species, that mystery of mysteries, "
        "as it has been called by one of our greatest philosophers. On my return home, it occurred to me, in 1837, "
        "that something might perhaps be made out on this question by patiently accumulating and reflecting on all "
        "sorts of facts which could possibly have any bearing on it. After five years' work I allowed myself to "
        "speculate on the subject, and drew up some short notes; these I enlarged in 1844 into a sketch of the "
        "conclusions, which then seemed to me probable: from that period to the present day I have steadily pursued "
        "the same object. I hope that I may be excused for entering on these personal details, as I give them to show "
        "that I have not been hasty in coming to a decision."
    ),
}


def token_ids(folder: Path, text: str) -> np.ndarray:
    """int32 [T]."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return np.array(tokenizer.encode(TEXTS[text]).ids, np.int32)
