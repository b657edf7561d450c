//! Which of several processes this one is, read from what launchers set in the environment.
//!
//! `drafthorse launch` and torchrun set the same variables (<https://docs.pytorch.org/docs/stable/elastic/run.html>), of which
//! Kubernetes' PyTorchJob, with one process a pod, sets those that do not count within a machine (pkg/controller.v1/pytorch/envvar.go in
//! <https://github.com/kubeflow/training-operator>); in an srun step Slurm's own stand in for them
//! (<https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES>).

use std::str::FromStr;

/// The variables that come all together or not at all.
const TOGETHER: [&str; 4] = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
/// Where c10d's store listens when nothing says otherwise.
const DEFAULT_PORT: u16 = 29500;

/// An environment that says only half of where this process stands.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    #[error(
        "the environment has {present} but not {missing}: a launcher (`drafthorse launch`, torchrun, a PyTorchJob) sets all of \
         them; for a single process unset those that are there"
    )]
    Missing { present: String, missing: String },
    #[error("the environment variable {variable} is `{value}`, which is not {expected}")]
    Malformed { variable: String, value: String, expected: String },
}

/// Where this process stands among those that work together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// From zero; rank 0 keeps the store and decides.
    pub rank: usize,
    /// How many processes work together.
    pub world: usize,
    /// This process's number among those on its machine: the device it takes.
    pub local_rank: usize,
    /// How many processes share its machine, as far as the launcher says: at least `local_rank + 1`.
    pub local_world: usize,
    pub master_addr: String,
    pub master_port: u16,
    /// torchrun's agent already serves the store on the port, so rank 0 connects like the others
    /// (TORCHELASTIC_USE_AGENT_STORE=True).
    pub store_is_served: bool,
}

impl Place {
    /// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which come all or none, through `get`, usually
    /// `|name| std::env::var(name).ok()`. LOCAL_RANK, by default 0, and LOCAL_WORLD_SIZE, by default just large enough for it, count
    /// only with them.
    ///
    /// Where RANK and WORLD_SIZE are absent, a step of several tasks that srun started takes SLURM_PROCID, SLURM_LOCALID and
    /// SLURM_STEP_NUM_TASKS in their place, MASTER_ADDR or else SLURM_LAUNCH_NODE_IPADDR, and MASTER_PORT or else 29500. `None` when
    /// launched alone.
    pub fn from_environment(get: impl Fn(&str) -> Option<String>) -> Result<Option<Place>, PlaceError> {
        let environment = Environment { get };
        let launched = TOGETHER[..2].iter().any(|name| environment.text(name).is_some());
        let place = match environment.number::<usize>("SLURM_STEP_NUM_TASKS")? {
            Some(tasks) if tasks > 1 && !launched => environment.slurm_place(tasks)?,
            _ if TOGETHER.iter().any(|name| environment.text(name).is_some()) => environment.launched_place()?,
            _ => return Ok(None),
        };
        place.checked().map(Some)
    }

    fn checked(self) -> Result<Self, PlaceError> {
        let below = |variable: &str, value: usize, limit: usize, of: &str| {
            let expected = format!("below {of} ({limit})");
            let error = PlaceError::Malformed { variable: variable.to_string(), value: value.to_string(), expected };
            if value < limit { Ok(()) } else { Err(error) }
        };
        below("RANK", self.rank, self.world, "WORLD_SIZE")?;
        below("LOCAL_RANK", self.local_rank, self.local_world, "LOCAL_WORLD_SIZE")?;
        Ok(self)
    }
}

struct Environment<F> {
    get: F,
}

impl<F: Fn(&str) -> Option<String>> Environment<F> {
    fn text(&self, name: &str) -> Option<String> {
        (self.get)(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
    }

    fn number<T: FromStr>(&self, name: &str) -> Result<Option<T>, PlaceError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        let parsed = value.parse().map(Some);
        parsed.map_err(|_| PlaceError::Malformed { variable: name.to_string(), value, expected: "a number in range".to_string() })
    }

    /// A number that must be there, or an error that names which variables are and which are not.
    fn needed<T: FromStr>(&self, name: &str, together: &[&str]) -> Result<T, PlaceError> {
        self.number(name)?.ok_or_else(|| self.missing(together))
    }

    fn missing(&self, together: &[&str]) -> PlaceError {
        let (present, missing): (Vec<&str>, Vec<&str>) = together.iter().partition(|name| self.text(name).is_some());
        PlaceError::Missing { present: present.join(", "), missing: missing.join(", ") }
    }

    fn launched_place(&self) -> Result<Place, PlaceError> {
        let local_rank = self.number("LOCAL_RANK")?.unwrap_or(0);
        Ok(Place {
            rank: self.needed("RANK", &TOGETHER)?,
            world: self.needed("WORLD_SIZE", &TOGETHER)?,
            local_rank,
            local_world: self.number("LOCAL_WORLD_SIZE")?.unwrap_or(local_rank + 1),
            master_addr: self.text("MASTER_ADDR").ok_or_else(|| self.missing(&TOGETHER))?,
            master_port: self.needed("MASTER_PORT", &TOGETHER)?,
            store_is_served: self.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true")),
        })
    }

    fn slurm_place(&self, world: usize) -> Result<Place, PlaceError> {
        let together = ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"];
        let address = self.text("MASTER_ADDR").or_else(|| self.text("SLURM_LAUNCH_NODE_IPADDR"));
        // `4(x2)` or `4,3`: the tasks on each node; the first number is right wherever nodes are used alike.
        let tasks = self.text("SLURM_STEP_TASKS_PER_NODE").unwrap_or_default();
        let on_this_node = tasks.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok());
        let local_rank = self.needed("SLURM_LOCALID", &together)?;
        Ok(Place {
            rank: self.needed("SLURM_PROCID", &together)?,
            world,
            local_rank,
            local_world: on_this_node.unwrap_or(1).max(local_rank + 1),
            master_addr: address.ok_or_else(|| self.missing(&["SLURM_PROCID", "MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"]))?,
            master_port: self.number("MASTER_PORT")?.unwrap_or(DEFAULT_PORT),
            store_is_served: false,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Option<Place>, PlaceError> {
        Place::from_environment(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string()))
    }

    const LAUNCHED: [(&str, &str); 5] =
        [("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "1234")];
    const SLURM: [(&str, &str); 4] =
        [("SLURM_PROCID", "5"), ("SLURM_LOCALID", "1"), ("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2)")];

    #[test]
    fn alone_where_nothing_is_set() {
        assert_eq!(place(&[]).unwrap(), None);
        assert_eq!(place(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")]).unwrap(), None);
        assert_eq!(place(&[("LOCAL_RANK", "3")]).unwrap(), None);
    }

    #[test]
    fn a_launchers_variables_are_read() {
        let expected = Place {
            rank: 3,
            world: 4,
            local_rank: 1,
            local_world: 2,
            master_addr: "node0".to_string(),
            master_port: 1234,
            store_is_served: false,
        };
        assert_eq!(place(&LAUNCHED).unwrap(), Some(expected.clone()));
        let torchrun = [&LAUNCHED[..], &[("LOCAL_WORLD_SIZE", "3"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(place(&torchrun).unwrap(), Some(Place { local_world: 3, store_is_served: true, ..expected.clone() }));
        // A launcher inside a Slurm step wins over Slurm.
        assert_eq!(place(&[&LAUNCHED[..], &SLURM].concat()).unwrap(), Some(expected.clone()));
        // What Kubernetes' PyTorchJob sets.
        let without_local = LAUNCHED.into_iter().filter(|(name, _)| *name != "LOCAL_RANK").collect::<Vec<_>>();
        assert_eq!(place(&without_local).unwrap(), Some(Place { local_rank: 0, local_world: 1, ..expected }));
    }

    #[test]
    fn half_of_the_variables_is_refused_by_name() {
        for absent in TOGETHER {
            let variables: Vec<_> = LAUNCHED.into_iter().filter(|(name, _)| *name != absent).collect();
            let message = place(&variables).unwrap_err().to_string();
            assert!(message.contains(&format!("but not {absent}:")), "{message}");
        }
        let message = place(&[("MASTER_ADDR", "node0")]).unwrap_err().to_string();
        assert!(message.contains("has MASTER_ADDR but not RANK, WORLD_SIZE, MASTER_PORT"), "{message}");
    }

    #[test]
    fn slurms_variables_stand_in() {
        let with_address = [&SLURM[..], &[("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")]].concat();
        let found = place(&with_address).unwrap().unwrap();
        assert_eq!((found.rank, found.world, found.local_rank, found.local_world), (5, 8, 1, 4));
        assert_eq!((found.master_addr.as_str(), found.master_port), ("10.0.0.1", 29500));
        let given = [&with_address[..], &[("MASTER_ADDR", "node7"), ("MASTER_PORT", "77")]].concat();
        let found = place(&given).unwrap().unwrap();
        assert_eq!((found.master_addr.as_str(), found.master_port), ("node7", 77));
        assert!(place(&SLURM).unwrap_err().to_string().contains("but not MASTER_ADDR, SLURM_LAUNCH_NODE_IPADDR"));
    }

    #[test]
    fn impossible_values_are_refused() {
        let with = |name: &'static str, value: &'static str| {
            let changed: Vec<_> = LAUNCHED.into_iter().map(|(key, old)| (key, if key == name { value } else { old })).collect();
            place(&changed).unwrap_err().to_string()
        };
        assert!(with("RANK", "4").contains("RANK is `4`, which is not below WORLD_SIZE (4)"));
        let few = [&LAUNCHED[..], &[("LOCAL_WORLD_SIZE", "1")]].concat();
        let message = place(&few).unwrap_err().to_string();
        assert!(message.contains("LOCAL_RANK is `1`, which is not below LOCAL_WORLD_SIZE (1)"), "{message}");
        assert!(with("MASTER_PORT", "99999").contains("MASTER_PORT is `99999`"));
        assert!(with("WORLD_SIZE", "two").contains("WORLD_SIZE is `two`"));
    }
}
