// Sorts tables by the titles of their columns. A page is whole without it; nothing is read or written beyond it.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], rows = [...body.rows], titles = [...table.tHead.rows[0].cells];
  if (rows.length < 2) continue;
  table.classList.add("sorts");
  const value = (row, column, numbers) => {
    const cell = row.cells[column], data = cell.querySelector("data"), text = cell.textContent.trim();
    if (!numbers) return text;
    const found = data ? [data.value] : /-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?/i.exec(text);
    return found ? Number(found[0].replaceAll(",", "")) : NaN;
  };
  const compare = (one, other) =>
    typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
  titles.forEach((title, column) => {
    if (!title.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const order = { ascending: "descending", descending: "none" }[title.getAttribute("aria-sort")] ?? "ascending";
      for (const one of titles) one.removeAttribute("aria-sort");
      if (order !== "none") title.setAttribute("aria-sort", order);
      const numbers = title.classList.contains("number"), turned = order === "descending" ? -1 : 1;
      const keyed = rows.map((row) => [value(row, column, numbers), row]);
      // Rows without a number come last either way; equal ones keep the order of the page.
      const missing = ([key]) => Number.isNaN(key);
      if (order !== "none")
        keyed.sort((one, other) => missing(one) - missing(other) || (missing(one) ? 0 : turned * compare(one[0], other[0])));
      body.append(...keyed.map(([, row]) => row));
    });
  });
}
