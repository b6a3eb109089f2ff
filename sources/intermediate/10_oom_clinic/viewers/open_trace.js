'use strict';
// Opens window.courseTrace in the trace viewer that stands above in the page.
document.addEventListener('WebComponentsReady', () => {
  const container = document.createElement('track-view-container');
  container.id = 'track_view_container';
  const viewer = document.createElement('tr-ui-timeline-view');
  viewer.track_view_container = container;
  Polymer.dom(viewer).appendChild(container);
  viewer.id = 'trace-viewer';
  viewer.globalMode = true;
  viewer.style.height = '100vh';
  Polymer.dom(document.body).appendChild(viewer);
  const model = new tr.Model();
  new tr.importer.Import(model).importTracesWithProgressDialog([window.courseTrace]).then(() => {
    viewer.model = model;
    viewer.viewTitle = document.title;
    window.courseModel = model;
  });
});
