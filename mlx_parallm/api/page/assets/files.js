// Files that are dropped on the page or pasted into its field.

/** Give files to `onFiles`; texts are left to the browser. `composer` shows where files may be dropped. */
export function takeFiles({ root, composer, field }, onFiles) {
  const take = (event, transfer) => {
    const files = [...(transfer?.files ?? [])];
    if (files.length === 0) return;
    event.preventDefault();
    onFiles(files);
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  root.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    composer.classList.add("dropping");
  });
  root.addEventListener("dragleave", (event) => {
    if (!root.contains(event.relatedTarget)) composer.classList.remove("dropping");
  });
  root.addEventListener("drop", (event) => {
    composer.classList.remove("dropping");
    if (hasFiles(event)) take(event, event.dataTransfer);
  });
  field.addEventListener("paste", (event) => take(event, event.clipboardData));
}
