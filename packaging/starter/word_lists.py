"""The words that new questions and invented passages are made of.

Knows nothing of passages and of scenes.
"""

from __future__ import annotations

HOW_TO = ["How can I ", "How to ", "What is the best way to ", "Whats the way to ", "I want to ", "What do I press to "]
VERBS = [
    ("tidy", "clean up", "drawer shelf archive notebook queue"),
    ("rename", "give another name to", "profile window session tape album"),
    ("open", "look into", "vault box journal cabinet ledger"),
    ("lock", "protect", "gate drawer profile cabin archive"),
    ("count", "find out the size of", "fleet herd tape queue ledger"),
    ("copy", "duplicate", "album poster recipe map ledger"),
    ("send", "pass on", "parcel letter poster signal bundle"),
    ("repair", "fix", "engine bridge clock lamp tape"),
    ("paint", "change the colour of", "fence window lamp boat poster"),
    ("pause", "hold", "clock engine march film tape"),
    ("sort", "put in order", "shelf deck herd album queue"),
    ("print", "put on paper", "map recipe ledger poster letter"),
    ("merge", "join", "queue bundle deck map ledger"),
    ("measure", "check the length of", "bridge fence tape boat film"),
    ("restore", "bring back", "journal archive film session map"),
]
ADJECTIVES = (
    "green hidden remote second broken daily private wide silent northern spare wooden shared early large".split()
)
WORDS = (
    "apply basket candle delta ember falcon garnet harbor island jigsaw kettle lantern marble needle orbit pepper "
    "quartz ribbon saddle tunnel umbrella velvet willow yonder zephyr anchor bishop copper dragon engine "
    "forest glider hammer insect "
    "jacket kernel ladder mirror narrow oyster pencil rocket silver timber urgent violet window yellow zigzag "
    "grab fetch store brief deep limit watch clear swap fold merge stack point level shape trace light sound"
).split()
FOREIGN = [
    *("Who is the {} of {}?|What is the {} of the {}?|Where is {}?|When was the {} born?|Why is the {} so {}?").split(
        "|"
    ),
    *("Who invented the {}?|How many {} are there in {}?|What is {}?|Who was {}?|Do you like {}?").split("|"),
    *("Write a {} about {}|Tell me about {}|Tell me about the {} of {}|What do you think of {}?").split("|"),
    *("Explain {} and {}|Translate {} into {}|What is the best {}?|How do I make {} with {}?").split("|"),
    *("Is {} bigger than {}?|Can you calculate {} times {}?|Give me a list of {}|What happened in {}?").split("|"),
    *("How old is the {}?|Which {} is {}?|how do i cook {}|the history of {}|a poem on {}|{} or {}, which?").split("|"),
]
THINGS = (
    "king queen president capital Spain Germany Italy China India Paris London Rome Tokyo river mountain ocean moon "
    "sun star planet earth history war peace love music song film book poem story essay letter email dog cat horse "
    "bird fish tree flower garden house car train plane bread rice soup cake dinner recipe cheese wine water "
    "football chess game number seven twelve hundred math physics chemistry biology atom cell Einstein Newton "
    "Shakespeare Mozart Napoleon French Spanish Latin English blue red green tall old fast weather rain snow summer "
    "winter money bank law doctor medicine school teacher child family friend work job city country world god life "
    "death science art paint robot Excel Photoshop Linux Python Java git Docker Windows printer phone camera router "
    "password website Facebook Google Amazon taxes insurance rent holiday hotel visa passport baby wedding birthday"
).split()
