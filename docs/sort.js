// A click on a column's name sorts a table by it: numbers by size, the largest first; text from A to Z. A second click turns
// the order round. Cells without a number come after those with one, empty cells last.
document.addEventListener("click", (event) => {
  const header = event.target.closest("article table th");
  if (!header) return;
  const body = header.closest("table").tBodies[0];
  const turned = header.dataset.sorted === "first";
  const textOf = (row) => row.cells[header.cellIndex].textContent.trim();
  const compare = (one, other) => {
    const [a, b] = [textOf(one), textOf(other)];
    const [x, y] = [a, b].map((text) => parseFloat(text.replaceAll(",", "")));
    if (!a || !b) return Number(!a) - Number(!b);
    if (isNaN(x) !== isNaN(y)) return Number(isNaN(x)) - Number(isNaN(y));
    const order = isNaN(x) ? a.localeCompare(b, undefined, { numeric: true }) : y - x;
    return turned ? -order : order;
  };
  for (const other of header.parentNode.cells) delete other.dataset.sorted;
  header.dataset.sorted = turned ? "turned" : "first";
  body.append(...[...body.rows].sort(compare));
});
