// SPDX-License-Identifier: Apache-2.0
//! The CNI configuration as the sign that pods may start. A runtime calls a node's network ready as soon as it finds a readable
//! configuration, so what stands in its directory is a symbolic link to a file beside subnet.env, which the agent writes once pods
//! can be reached. That directory is empty after a boot: the link dangles, and the node is not ready until the agent is.
//!
//! Runtimes look at their directory when inotify tells of it, and not at what a link in it leads to: a link is never left as it
//! is when the file is new, but replaced by a new one.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_subnet::env::beside;

use crate::files;
use crate::options::CniOptions;

/// Name of the configuration in both directories: flannel's, whose file the link replaces. An agent whose subnet file is not called
/// `subnet.env` has another name, `10-flannel_NAME.conflist`: runtimes take the first in the order of names, which is this one.
pub const NAME: &str = "10-flannel.conflist";
/// What others do to link and file is mended within this time.
const EVERY: Duration = Duration::from_secs(10);

/// Publishes the configuration; does nothing without [`CniOptions`].
#[derive(Debug, Default)]
pub struct Conflist {
    options: Option<CniOptions>,
    subnet_file: PathBuf,
    next: Option<Instant>,
    /// A link of this agent's own making stands there: an earlier agent may have died between file and link.
    linked: bool,
    problem: Option<String>,
}

impl Conflist {
    /// Nothing is published yet.
    pub fn new(options: Option<CniOptions>, subnet_file: &Path) -> Conflist {
        Conflist { options, subnet_file: subnet_file.to_owned(), ..Conflist::default() }
    }

    /// The file that is published, to be watched.
    pub fn source(&self) -> Option<&Path> {
        self.options.as_ref().map(|options| options.conf.as_path())
    }

    /// What keeps the configuration from being published, or an edit of it from being followed.
    pub fn problem(&self) -> Option<String> {
        self.problem.clone()
    }

    /// When [`Conflist::keep`] has something to look at again.
    pub fn next(&self) -> Option<Instant> {
        self.next.filter(|_| self.options.is_some())
    }

    /// The source changed: the next [`Conflist::keep`] looks at once.
    pub fn look_again(&mut self) {
        self.next = None;
    }

    /// Pods can be reached: brings file and link to what they should be. Looks at most every ten seconds.
    pub fn keep(&mut self, now: Instant) {
        if self.options.is_none() || self.next.is_some_and(|next| now < next) {
            return;
        }
        // The plugin would wait for subnet.env, at the cost of every pod's first seconds.
        if !self.subnet_file.exists() {
            return;
        }
        self.next = Some(now + EVERY);
        let problem = self.publish().err().or_else(|| self.others());
        let problem = problem.map(|text| format!("CNI configuration: {text}"));
        if self.problem != problem
            && let Some(text) = &problem
        {
            tracing::error!("{text}");
        }
        self.problem = problem;
    }

    /// Configurations of others. After a boot, while our link dangles, a runtime that skips what it cannot read takes one of them
    /// (CRI-O does; containerd reports an error), and before ours in the order of names any runtime does.
    fn others(&self) -> Option<String> {
        let dir = &self.options.as_ref()?.dir;
        let ours = link(dir, &self.subnet_file);
        let names = fs::read_dir(dir).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_one = |name: &String| {
            let kind = Path::new(name).extension().and_then(|kind| kind.to_str());
            Some(name.as_ref()) != ours.file_name() && matches!(kind, Some("conf" | "conflist" | "json"))
        };
        let mut others: Vec<String> = names.filter(is_one).collect();
        others.sort_unstable();
        let names = others.join(", ");
        (!others.is_empty()).then(|| {
            format!(
                "{} has {names} too: after a boot pods may start on that network; remove what is not in use",
                dir.display()
            )
        })
    }

    fn publish(&mut self) -> Result<(), String> {
        let Some(CniOptions { conf, dir }) = &self.options else { return Ok(()) };
        let remedy = "correct cni-conf.json (ConfigMap kube-flannel-cfg); nothing new is published until then";
        let text = files::read(conf).map_err(|error| format!("read {}: {error}: {remedy}", conf.display()))?;
        judge(&text).map_err(|why| format!("{} is not a list of CNI plugins: {why}: {remedy}", conf.display()))?;
        let (file, link) = (published(&self.subnet_file), link(dir, &self.subnet_file));
        let wrote = files::write(&file, &text).map_err(|error| format!("write {}: {error}", file.display()))?;
        if !wrote && self.linked && leads_to(&link, &file) {
            return Ok(());
        }
        place(&link, &file)
            .map_err(|error| format!("make the link {}: {error}{}", link.display(), files::remedy(&error, dir)))?;
        tracing::info!(link = %link.display(), file = %file.display(), "CNI configuration published");
        self.linked = true;
        Ok(())
    }
}

/// Takes away the link, if it is the one that an agent with this subnet file makes, and what it leads to. True if there was one.
pub fn remove(dir: &Path, subnet_file: &Path) -> io::Result<bool> {
    let (file, link) = (published(subnet_file), link(dir, subnet_file));
    let ours = leads_to(&link, &file);
    if ours {
        fs::remove_file(&link)?;
    }
    match fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(ours),
    }
}

/// Where the link leads: beside subnet.env, so that both go with a boot. Absolute: a link says nothing of where we run.
fn published(subnet_file: &Path) -> PathBuf {
    let file = beside(subnet_file, NAME, |name| format!("10-flannel_{name}.conflist"));
    std::path::absolute(&file).unwrap_or(file)
}

/// The link, in the runtime's directory: it has the name of the file that it leads to.
fn link(dir: &Path, subnet_file: &Path) -> PathBuf {
    dir.join(published(subnet_file).file_name().unwrap_or_default())
}

fn leads_to(link: &Path, file: &Path) -> bool {
    fs::read_link(link).is_ok_and(|to| to == file)
}

/// A new link in the place of whatever file or link stands there.
fn place(link: &Path, file: &Path) -> io::Result<()> {
    let dir = link.parent().unwrap_or(Path::new("/"));
    DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    let aside = tempfile::Builder::new().prefix(".weft-").make_in(dir, |path| symlink(file, path))?;
    aside.into_temp_path().persist(link).map_err(|failed| failed.error)?;
    File::open(dir)?.sync_all()
}

/// What a runtime would not load. It tells nobody but its own log, so it is said here.
fn judge(text: &[u8]) -> Result<(), String> {
    let list: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let named = |value: &Value, key: &str| value[key].as_str().is_some_and(|name| !name.is_empty());
    if !named(&list, "name") {
        return Err("it has no `name`".to_owned());
    }
    match list["plugins"].as_array() {
        Some(plugins) if !plugins.is_empty() => match plugins.iter().position(|plugin| !named(plugin, "type")) {
            Some(at) => Err(format!("plugin {} has no `type`", at + 1)),
            None => Ok(()),
        },
        _ => Err("it has no `plugins`".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const LIST: &str = r#"{"name":"cbr0","cniVersion":"0.3.1","plugins":[{"type":"flannel","delegate":{}}]}"#;

    struct Place {
        dir: tempfile::TempDir,
        conflist: Conflist,
    }

    impl Place {
        fn new() -> Place {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir(dir.path().join("run")).unwrap();
            fs::write(dir.path().join("conf.json"), LIST).unwrap();
            let conflist = agent(dir.path());
            Place { dir, conflist }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn look(&mut self) {
            self.conflist.look_again();
            self.conflist.keep(Instant::now());
        }

        /// The link's inode, and what is read through it.
        fn seen(&self) -> (u64, String) {
            let link = self.path("net.d").join(NAME);
            let inode = fs::symlink_metadata(&link).unwrap();
            assert!(inode.is_symlink());
            (inode.ino(), fs::read_to_string(link).unwrap())
        }
    }

    fn agent(dir: &Path) -> Conflist {
        let options = CniOptions { conf: dir.join("conf.json"), dir: dir.join("net.d") };
        Conflist::new(Some(options), &dir.join("run/subnet.env"))
    }

    #[test]
    fn it_waits_for_subnet_env_and_leaves_alone_what_is_right() {
        let mut place = Place::new();
        place.look();
        assert!(!place.path("net.d").exists(), "before subnet.env");
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.conflist.keep(Instant::now());
        let first = place.seen();
        assert_eq!(first.1, LIST);
        place.look();
        assert_eq!(place.seen(), first, "nothing changed, nothing written");
        let left = fs::read_dir(place.path("net.d")).unwrap().count();
        assert_eq!(left, 1, "nothing temporary stays");
    }

    #[test]
    fn a_new_agent_makes_a_new_link() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.look();
        // Held, so that the number of the inode is not given again.
        fs::hard_link(place.path("net.d").join(NAME), place.path("net.d/held")).unwrap();
        let (inode, _) = place.seen();
        place.conflist = agent(place.dir.path());
        place.look();
        assert_ne!(place.seen().0, inode, "the runtime may never have looked at the other one");
    }

    #[test]
    fn edits_are_followed_and_harm_is_mended() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        // What flannel left.
        fs::create_dir(place.path("net.d")).unwrap();
        fs::write(place.path("net.d").join(NAME), "{}").unwrap();
        place.look();
        assert_eq!(place.seen().1, LIST);
        let edited = LIST.replace("cbr0", "other");
        fs::write(place.path("conf.json"), &edited).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited);
        fs::remove_file(place.path("run").join(NAME)).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited, "the file came back");
        fs::remove_file(place.path("net.d").join(NAME)).unwrap();
        place.look();
        assert_eq!(place.seen().1, edited, "the link came back");
    }

    #[test]
    fn what_no_runtime_would_load_is_not_published() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.look();
        for (text, why) in [
            ("{", "EOF"),
            ("[]", "no `name`"),
            (r#"["cbr0",[["flannel"]]]"#, "no `name`"),
            (r#"{"plugins":[{"type":"flannel"}]}"#, "no `name`"),
            (r#"{"name":"","plugins":[{"type":"flannel"}]}"#, "no `name`"),
            (r#"{"name":"cbr0","type":"flannel"}"#, "no `plugins`"),
            (r#"{"name":"cbr0","plugins":[]}"#, "no `plugins`"),
            (r#"{"name":"cbr0","plugins":[{"delegate":{}}]}"#, "plugin 1 has no `type`"),
            (r#"{"name":"cbr0","plugins":[{"type":"a"},{"type":""}]}"#, "plugin 2 has no `type`"),
        ] {
            fs::write(place.path("conf.json"), text).unwrap();
            place.look();
            let problem = place.conflist.problem().unwrap();
            assert!(problem.contains(why), "{text}: {problem}");
            assert!(problem.contains("conf.json") && problem.contains("correct cni-conf.json"), "{problem}");
            assert_eq!(place.seen().1, LIST, "what was good stays");
        }
        fs::remove_file(place.path("conf.json")).unwrap();
        place.look();
        assert!(place.conflist.problem().unwrap().contains("conf.json: No such file"));
        fs::write(place.path("conf.json"), LIST).unwrap();
        place.look();
        assert_eq!(place.conflist.problem(), None);
    }

    #[test]
    fn only_our_own_link_is_removed() {
        let mut place = Place::new();
        fs::write(place.path("run/subnet.env"), "").unwrap();
        place.look();
        let (dir, env, link) = (place.path("net.d"), place.path("run/subnet.env"), place.path("net.d").join(NAME));
        assert!(!remove(&dir, &place.path("other/subnet.env")).unwrap(), "of another instance");
        assert!(link.exists());
        assert!(remove(&dir, &env).unwrap());
        assert!(!link.is_symlink() && !place.path("run").join(NAME).exists());
        fs::write(&link, "{}").unwrap();
        assert!(!remove(&dir, &env).unwrap(), "a file is somebody's");
        assert!(link.exists());
    }

    #[test]
    fn two_agents_with_one_directory_do_not_take_each_other_s_place() {
        let mut first = Place::new();
        fs::write(first.path("run/subnet.env"), "").unwrap();
        fs::write(first.path("run/second.env"), "").unwrap();
        let edited = LIST.replace("cbr0", "cbr1");
        fs::write(first.path("second.json"), &edited).unwrap();
        let options = CniOptions { conf: first.path("second.json"), dir: first.path("net.d") };
        let mut second = Conflist::new(Some(options), &first.path("run/second.env"));
        first.look();
        let before = first.seen();
        second.keep(Instant::now());
        first.look();
        assert_eq!(first.seen(), before, "the first one's link and file stay");
        let link = first.path("net.d/10-flannel_second.env.conflist");
        assert_eq!(fs::read_to_string(&link).unwrap(), edited);
        let mut names: Vec<_> =
            fs::read_dir(first.path("net.d")).unwrap().map(|name| name.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names[0], NAME, "a runtime takes the usual agent's");
        assert!(
            first.conflist.problem().unwrap().contains("10-flannel_second.env.conflist"),
            "and each names the other"
        );
        assert!(remove(&first.path("net.d"), &first.path("run/second.env")).unwrap());
        assert_eq!(first.seen(), before);
        assert!(!link.is_symlink());
    }
}
