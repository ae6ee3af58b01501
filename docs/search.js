// The search would read the dashes of `--image-size` as its own operator and find nothing.
document.addEventListener("input", (event) => {
  const field = event.target;
  if (field.matches(".md-search__input")) field.value = field.value.replace(/(^|\s)--+/g, "$1");
});
