# ruff: noqa: E501  (a wording is one line of text)
"""Scenarios of word problems, second part: plants, sports, travel, crafts and shops.

Every scenario takes a `Draw` and returns (problem, follow-up) as texts with `[one|or|other]` wordings still
open. Knows nothing of conversations, files or code requests.
"""

from __future__ import annotations

from drawing import Draw, count


def greenhouse(d: Draw) -> tuple[str, str]:
    p, rows, plants = d.person(), d.n(5, 15), d.n(8, 24, 2)
    crop = d.pick("tomato plants", "pepper plants", "cucumbers", "lettuces", "strawberry plants")
    return (
        f"In {p}'s greenhouse {rows} rows of {plants} {crop} [grow|are growing]. [A quarter|Half] of the plants [dry out|fall ill], and {p} [plants|adds] {d.n(10, 40, 5)} new ones. How many plants are [there|in the greenhouse] [now|after that]?",
        f"[Each plant|Every plant] [yields|bears] {d.n(2, 5)} kilograms, and a kilogram sells for ${d.n(2, 4)}. What do {rows * 4} plants bring in [if {p} pays ${d.n(20, 80, 10)} for water|after ${d.n(20, 80, 10)} for fertilizer is subtracted]?",
    )


def tutor(d: Draw) -> tuple[str, str]:
    p, price, kids, weeks = d.person(), d.n(15, 40), d.n(2, 6), d.n(4, 10)
    lesson = d.pick("piano", "guitar", "Spanish", "chess", "math", "drawing")
    return (
        f"{p} gives {lesson} lessons [for|at] ${price} [an hour|each]. [{p.He} has {kids} students who come twice a week|Twice a week {kids} students come to {p.him}]. [In {weeks} weeks|Over {weeks} weeks], {d.n(2, 6)} lessons were canceled [and not paid|]. How much did {p.he} earn?",
        f"[A friend buys|One can also buy] {d.pick(10, 12)} {lesson} lessons at once for ${price * 9}. How much [cheaper is that than|does one save compared with] paying ${price} for each?",
    )


def recycling(d: Draw) -> tuple[str, str]:
    p, q = d.person(), d.person()
    cans, bottles, cent = d.n(40, 120, 10), d.n(20, 80, 10), d.pick(5, 10)
    return (
        f"[For a recycling drive|To help the park], {p} collects {cans} cans and {bottles} bottles, and {q} collects half as many cans but twice as many bottles. [Each piece|Every can and bottle] is worth {cent} cents. How many dollars do they [get|raise] together?",
        f"[The class|Their class] collected {cans * 5} cans in [a month|four weeks], {d.n(20, 80, 10)} of them in the first week, and [as many|the same number] in each of the other 3 weeks. About how many was that [a week|per week]?",
    )


def camping(d: Draw) -> tuple[str, str]:
    tents, per, cabins = d.n(4, 12), d.n(2, 4), d.n(3, 8)
    return (
        f"[At a summer camp|In a camp by the lake] {tents} tents hold {per} children each and {cabins} cabins hold {per * 2} each. [All beds are full|Every place is taken], and there is one leader for every {per} children. How many leaders are there?",
        f"[The camp cook needs|Cooking takes] {d.n(2, 5)} pounds of potatoes for {d.n(4, 6)} children. [How many pounds are cooked|How many pounds is that] for {d.pick(60, 120, 180)} children [over|in] {d.n(2, 5)} days?",
    )


def taxi(d: Draw) -> tuple[str, str]:
    p, start, rate, miles = d.person(), d.n(3, 6), d.n(2, 4), d.n(5, 18)
    return (
        f"[A taxi in this city costs|For a taxi you pay] ${start} to start and ${rate} [a mile|for each mile]. {p} rides {miles} miles [to the airport|to the hospital|to a wedding] and [gives|adds] a tip of ${d.n(2, 6)}. [On the way back|Going home] {p.he} takes the train for ${d.n(3, 9)}. What does {p.he} spend?",
        f"[The driver|A taxi driver] has {d.n(8, 16)} rides [a day|on a normal day] of {d.n(3, 7)} miles each. At ${start} plus ${rate} a mile, what [does he|does she] take in [a day|on such a day]?",
    )


def cookies(d: Draw) -> tuple[str, str]:
    p, q, n_, each = d.person(), d.person(), d.n(3, 8), d.n(12, 24, 2)
    return (
        f"{p} bakes {n_} batches of {each} cookies [for the neighbors|for a school party|with {p.his} children]. [{q} from next door eats|Hungry {q} eats] {d.n(3, 9)}, {d.n(4, 10)} burn, and [the others|all others] are put in bags of {d.pick(4, 6, 8)}. How many [full bags|bags] [does {p.he} get|are there]?",
        f"[One batch needs|For one batch you need] {d.n(2, 3)} cups of sugar and {d.n(2, 4)} [eggs|spoons of butter]. [How many cups of sugar are in|How much sugar is needed for] {n_ * 2} batches[ if a third of the sugar is left out|]?",
    )


def parking(d: Draw) -> tuple[str, str]:
    floors, spots, cars = d.n(3, 8), d.n(30, 80, 5), d.n(15, 60)
    return (
        f"A [parking garage|car park] has {floors} floors with {spots} spaces [on each|each]. [At noon|In the afternoon], {cars} spaces are free. [In the next hour|Until six] {d.n(5, 14)} cars [drive in|come] and {d.n(20, 60, 5)} [leave|drive away]. How many cars are [parked there|in it] then?",
        f"[Parking|A space] costs ${d.n(2, 4)} for the first hour and ${d.n(1, 2)} for each further hour. What do {d.n(10, 40, 5)} cars pay [that stay|if each of them stays] {d.n(3, 7)} hours?",
    )


def toys(d: Draw) -> tuple[str, str]:
    a, b, c = d.some(["cars", "dolls", "trains", "puzzles", "kites", "robots", "teddy bears", "board games"], 3)
    x, y, z = d.n(4, 9), d.n(10, 19), d.n(20, 35)
    shop = d.pick("A toy shop", "The shop on the corner", "An online toy store", "A toy seller at the market")
    return (
        f"{shop} sells {a} for ${x}, {b} for ${y} and {c} for ${z}. [In one day|On Saturday|Before the holidays] it sells {d.n(5, 20)} {a}, {d.n(3, 12)} {b} and {d.n(2, 9)} {c}. [What does it take in|How many dollars is that]?",
        f"[The price of the {c} falls|All {c} become cheaper] from ${z * 2} to ${z}, and now {d.n(3, 5)} times as many [are sold|of them are sold] as the {d.n(4, 10)} [a day|a week] before. [How much money is that now|What is the new income from {c}]?",
    )


def garden_beds(d: Draw) -> tuple[str, str]:
    p, side, deep = d.person(), d.n(2, 5), d.pick(2, 3)
    return (
        f"{p} builds {d.n(2, 6)} [raised beds|sand boxes], each {side + 2} feet long, {side} feet wide and {deep} feet deep. [Soil comes|Sand comes] in bags of {d.pick(2, 3)} cubic feet [for|at] ${d.n(4, 8)}. How many bags does {p.he} need[?| , and what do they cost?]",
        f"Along the edge of a bed of {side + 2} by {side} feet {p} [sets|plants] a flower every foot. [How many flowers are that|How many flowers does {p.he} need] for {d.n(2, 6)} beds?",
    )


def streaming(d: Draw) -> tuple[str, str]:
    p, episodes, minutes, seasons = d.person(), d.n(8, 16), d.n(25, 55, 5), d.n(2, 6)
    return (
        f"A [series|show] has {seasons} seasons of {episodes} episodes, and [an episode lasts {minutes} minutes|every episode is {minutes} minutes long]. {p} has [seen|watched] the first season and {d.n(2, 7)} episodes of the second. How many minutes [are still to be watched|has {p.he} still got to watch]?",
        f"If {p} watches {d.n(2, 4)} episodes [a night|every evening], [how many nights does {p.he} need for {episodes * 6} episodes|after how many days has {p.he} seen {episodes * 6} of them]?",
    )


def water(d: Draw) -> tuple[str, str]:
    big, rate_in, rate_out = d.n(600, 2400, 120), d.n(20, 40, 4), d.n(4, 12, 4)
    return (
        f"[A pool holds|The pool of a hotel holds|A water tank holds] {big} gallons. [A hose fills|A pump fills] it with {rate_in} gallons a minute, [but|while] {rate_out} gallons a minute [leak out|run off]. [It is half full already.|At first it is empty.] How long does it take [until it is full|to fill it]?",
        f"Water costs ${d.n(2, 6)} for every 100 gallons. What does it cost to fill {d.n(2, 5)} tanks of {big // 100 * 100} gallons[ if a fifth of each is rain water|]?",
    )


def votes(d: Draw) -> tuple[str, str]:
    a, b, c = d.person(), d.person(), d.person()
    total, share = d.n(200, 800, 100), d.pick(20, 25, 30, 40, 50)
    return (
        f"[In the school election|In the vote for mayor|When the club chose a president], {total} [people voted|votes were counted]. {a} got {share}% of the votes, {b} {d.n(20, 60, 5)} [votes|] less than {a}, and {c} [got the rest|all the others]. How many votes did {c} get?",
        f"[Two years later|The next time] {total + 100} people vote, and {a} gets {share + 10}%. [How many votes more or fewer is that|By how many votes does {a.his} result change] compared with {total * share // 100}?",
    )


def farm_animals(d: Draw) -> tuple[str, str]:
    p, cows, k = d.person(), d.n(6, 20), d.n(2, 5)
    a, b = d.some(["sheep", "goats", "pigs", "ducks", "geese"], 2)
    return (
        f"[On {p}'s farm there are|{p} keeps] {cows} cows, {k} times as many {a} as cows, and {d.n(4, 15)} {b}. [{p.He} sells|Then {p.he} sells] {d.pick('a third', 'half', 'a quarter')} of the {a} [and buys|but gets] {d.n(3, 9)} more {b}. How many animals [live on the farm|does {p.he} have] then?",
        f"[A cow gives|Each cow gives] {d.n(15, 28)} liters of milk a day. [{p} sells|The dairy buys] the milk of {cows} cows for {d.pick(40, 50, 60)} cents a liter. [How much is that|What does {p.he} get] for {d.n(3, 10)} days?",
    )


def trains_meet(d: Draw) -> tuple[str, str]:
    v, w, t = d.n(40, 70, 5), d.n(50, 90, 5), d.n(2, 5)
    a, b = d.some(["Aldport", "Brixham", "Corvale", "Dunmore", "Elmstead", "Fairlee"], 2)
    return (
        f"[Two trains start at the same time|At eight o'clock two trains start], one from {a} at {v} miles per hour and one from {b} at {w} miles per hour, [toward each other|on parallel tracks toward each other]. They [meet|pass each other] after {t} hours. How far is {a} from {b}?",
        f"[The train from {a}|One of the trains] is late and goes only {v - 10} miles per hour. How many miles fewer does it cover in {t} hours[?| than at {v}?]",
    )


def puzzle(d: Draw) -> tuple[str, str]:
    p, q, pieces, rate = d.person(), d.person(), d.n(500, 1500, 100), d.n(20, 50, 5)
    return (
        f"{p} and {q} [are doing|work on] a jigsaw puzzle of {pieces} pieces. {p} places {rate} pieces an hour and {q} {rate // 5} [fewer|more]. [After {d.n(2, 6)} hours|When they stop after {d.n(2, 6)} hours], how many pieces [are missing|still lie on the table]?",
        f"Alone, {q} places {rate} pieces an hour and works {d.n(2, 4)} hours [a day|every evening] on a puzzle of {rate * 24} pieces. How many days [does it take|is {q.he} busy]?",
    )


def discount_books(d: Draw) -> tuple[str, str]:
    p, price, count, off = d.person(), d.n(8, 30, 2), d.n(3, 9), d.pick(10, 20, 25, 50)
    item = d.pick("books", "T-shirts", "plants", "video games", "mugs", "posters")
    return (
        f"[{p} buys {count} {item} that normally cost ${price} each|The normal price of {count} {item} in {p}'s basket is ${price} each]. [There is a sale with {off}% off|Today everything is {off}% cheaper], and [shipping|postage] [is|costs] ${d.n(3, 8)}. [What does {p} pay|What is the total price]?",
        f"[Without the sale|At the full price of ${price}], how many {item} could {p} buy [with|for] ${price * d.n(4, 9) + d.n(1, price - 1)}, and what would be left?",
    )


def commute(d: Draw) -> tuple[str, str]:
    p, walk, ride, days = d.person(), d.n(5, 15), d.n(15, 45, 5), d.n(3, 5)
    return (
        f"[On the way to work|Every morning] {p} walks {walk} minutes to the [station|bus stop], waits {d.n(3, 9)} minutes and rides for {ride} minutes. [The way home takes|Going back takes {p.him}] {d.n(5, 15)} minutes longer. How many minutes does {p.he} travel in a week of {days} working days?",
        f"[A monthly ticket costs|{p} could buy a monthly ticket for] ${d.n(50, 90, 5)} [and|, while] a single ride [costs|is] ${d.n(2, 4)}. [What is cheaper for {d.n(14, 22)} working days with two rides a day, and by how much|How much would two rides a day on {d.n(14, 22)} days cost]?",
    )


def photo(d: Draw) -> tuple[str, str]:
    p, taken, per = d.person(), d.n(120, 400, 20), d.pick(4, 6, 8)
    return (
        f"{p} took {taken} photos [on vacation|at a wedding|in the mountains]. {p.He} deleted {d.n(20, 90, 5)} [blurry ones|of them] and printed half of the others. [An album page holds|On a page of the album there is room for] {per} photos. How many pages [does {p.he} fill|are needed]?",
        f"[One print costs|A print is] {d.pick(15, 20, 25, 30)} cents, and the album ${d.n(9, 25)}. [How much do|What do] {per * 20} prints and {d.n(2, 3)} albums [cost|cost in all]?",
    )


def charity_run(d: Draw) -> tuple[str, str]:
    p, laps, rate, sponsors = d.person(), d.n(8, 30), d.n(1, 4), d.n(3, 9)
    return (
        f"{p} runs {laps} laps in a charity run. [{sponsors} sponsors pay|From each of {sponsors} sponsors {p.he} gets] ${rate} for every lap, and {p.his} [grandfather|teacher|boss] [adds|gives] ${d.n(10, 50, 5)} [on top|no matter how many]. How much does {p} [raise|collect]?",
        f"[A lap is {d.pick(200, 250, 400)} meters long|One lap measures {d.pick(200, 250, 400)} meters]. How many kilometers are {d.pick(20, 40, 60)} laps, and how many laps [are|make] {d.n(2, 6)} kilometers?",
    )


def workshop_chairs(d: Draw) -> tuple[str, str]:
    p, chairs, tables = d.person(), d.n(6, 20), d.n(2, 6)
    return (
        f"[A carpenter, {p},|{p} is a carpenter and] makes {chairs} chairs and {tables} tables in a month. [For a chair {p.he} uses|A chair takes] {d.n(2, 4)} boards and [for a table|a table takes] {d.n(6, 10)}. [One board costs ${d.n(3, 9)}|Boards are ${d.n(3, 9)} each]. How much does the wood cost?",
        f"{p} sells a chair for ${d.n(45, 95, 5)} and a table for ${d.n(150, 320, 10)}. [What does {p.he} get|How much money is it] for {d.n(4, 8)} chairs and {count(d.n(1, 3), 'table')}[ if {d.pick(5, 10)}% goes to the shop|]?",
    )


def medicine(d: Draw) -> tuple[str, str]:
    p, per_day, days, box = d.person(), d.n(2, 4), d.n(10, 30, 5), d.pick(12, 20, 24, 30)
    return (
        f"[The doctor tells {p} to take|{p} has to take] {per_day} tablets a day for {days} days [and then one a day for {d.n(5, 14)} days|, and after that one a day for another {d.n(5, 14)}]. [They come|The tablets come] in boxes of {box}. How many boxes [must {p.he} get|are necessary]?",
        f"A box of {box} tablets costs ${box * d.pick(1, 2) // 2}, and the insurance pays {d.pick(50, 75, 80)}% [of it|of the price]. [What does {p} pay|How much is left to pay] for {d.n(2, 8)} boxes?",
    )


def battery(d: Draw) -> tuple[str, str]:
    p, drop, hours = d.person(), d.n(6, 15), d.n(3, 6)
    device = d.pick("laptop", "tablet", "phone", "camera drone", "electric bike")
    return (
        f"The battery of {p}'s {device} is [full at nine o'clock|at 100% in the morning]. [It loses {drop}% an hour|Every hour it loses {drop}%] while {p.he} uses it. {p.He} uses it for {hours} hours [, then|and then] charges it for half an hour, [which adds|adding] {d.n(8, 20)}%. How full is the battery then?",
        f"[Charging|A charger] adds {d.n(1, 2)}% in a minute. How many minutes does it take from {d.n(10, 40, 2)}% to {d.n(80, 100, 2)}%[?| , and how many hours are 3 such charges?]",
    )


def bricks(d: Draw) -> tuple[str, str]:
    p, courses, per, rate = d.person(), d.n(8, 24), d.n(20, 60, 4), d.n(40, 90, 10)
    return (
        f"A wall [has|is to have] {courses} rows of {per} bricks. {p} [lays|can lay] {rate} bricks an hour and [has worked for|works] {d.n(2, 5)} hours. How many bricks [are still to be laid|does {p.he} still have to lay]?",
        f"[Bricks are delivered|They come] on pallets of {d.pick(200, 250, 300)} [for|at] ${d.n(90, 180, 10)}. [How many pallets|How many of them] must {p} order for {courses * 100} bricks, and what is the price?",
    )


def tournament(d: Draw) -> tuple[str, str]:
    teams, players, fee = d.n(6, 16, 2), d.n(5, 11), d.n(5, 15)
    sport = d.pick("volleyball", "basketball", "handball", "table tennis", "hockey")
    return (
        f"{teams} teams of {players} [players|people] [take part|play] in a {sport} tournament. [Every player pays|The fee per player is] ${fee}. [The winners get a prize of|The first prize is worth] ${d.n(100, 250, 10)} [and|, and] the hall costs ${d.n(60, 140, 10)}. How much money [is left over|remains]?",
        f"[If each team plays every other team once, how|Every team plays each of the others once. How] many games [are played|is that] with {teams} teams, and how many [hours|minutes] do they take at {d.pick(20, 30, 40)} minutes a game?",
    )


def ice_cream(d: Draw) -> tuple[str, str]:
    small, large, cost = d.n(2, 3), d.n(4, 6), d.n(40, 120, 10)
    p = d.person()
    return (
        f"{p} sells ice cream [at the beach|in the park] for ${small} a [small cone|scoop] and ${large} [a large cup|a large one]. [On a hot day|On Sunday] {p.he} sells {d.n(30, 80, 5)} of the small and {d.n(15, 50, 5)} of the large ones. [Ingredients cost ${cost}|{p.He} has paid ${cost} for the ingredients]. What is [left|{p.his} gain]?",
        f"[A tub holds|One tub is enough for] {d.n(30, 60, 5)} scoops. If {p} sells {d.n(100, 240, 20)} scoops a day, how many tubs does {p.he} need for {d.n(3, 7)} days?",
    )


MORE_SCENARIOS = (
    greenhouse,
    tutor,
    recycling,
    camping,
    taxi,
    cookies,
    parking,
    toys,
    garden_beds,
    streaming,
    water,
    votes,
    farm_animals,
    trains_meet,
    puzzle,
    discount_books,
    commute,
    photo,
    charity_run,
    workshop_chairs,
    medicine,
    battery,
    bricks,
    tournament,
    ice_cream,
)
