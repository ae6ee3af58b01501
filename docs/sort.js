// A click on a column's name sorts a table by it: numbers by size, the largest first; empty cells stay last.
document.addEventListener("click", (event) => {
  const header = event.target.closest("article table th");
  if (!header) return;
  const body = header.closest("table").tBodies[0];
  const descending = header.dataset.sorted !== "descending";
  const valueOf = (row) => row.cells[header.cellIndex].textContent.trim();
  const compare = (one, other) => {
    const [a, b] = [valueOf(one), valueOf(other)];
    if (!a || !b) return Number(!a) - Number(!b);
    const order = isNaN(parseFloat(a)) ? b.localeCompare(a) : parseFloat(a) - parseFloat(b);
    return descending ? -order : order;
  };
  for (const other of header.parentNode.cells) delete other.dataset.sorted;
  header.dataset.sorted = descending ? "descending" : "ascending";
  body.append(...[...body.rows].sort(compare));
});
